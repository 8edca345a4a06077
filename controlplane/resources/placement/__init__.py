"""Asking what a machine would find in the fleet, without making one."""
