"""Learning what a host is. The one rule: probe, never assume; what cannot be read becomes a condition, never a crash."""
