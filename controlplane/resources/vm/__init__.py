"""Virtual machines: one request places and reserves, a program carries it out, the API shows wanted and observed."""
