"""Snapshots of volumes: taken while the machine runs, kept until they are deleted, the beginning of new volumes."""
