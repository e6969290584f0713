"""Compute. torch is imported in this package alone, and not by its `api` and `toy` modules."""
