"""Errors of the audit trail: none of its own."""
