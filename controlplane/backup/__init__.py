"""Backups of the control plane: its database in one file, its keys in another."""
