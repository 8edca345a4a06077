"""Interfaces of machines. They live and go with their machine, so there is neither a route nor a program of their own."""
