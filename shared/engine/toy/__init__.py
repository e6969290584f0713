"""A deterministic engine without torch."""
