"""Putting the agent on a host and taking it off again. The one rule: changes are data first, acts second."""
