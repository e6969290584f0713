"""The memory that blocks lie in."""
