"""Asking where a machine would fit has no errors of its own: that it fits nowhere is an answer."""
