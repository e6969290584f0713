"""A cache node's decisions."""
