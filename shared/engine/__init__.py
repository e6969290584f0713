"""Compute. Only this package imports torch, and its `api` and `toy` modules do not."""
