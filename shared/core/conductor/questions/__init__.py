"""Which questions for a place are still waited for."""
