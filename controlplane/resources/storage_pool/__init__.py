"""Places for volumes on hosts, learned from what hosts say, and given away a volume at a time."""
