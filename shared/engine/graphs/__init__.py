"""Decode steps as CUDA graphs: fixed sizes, padded batches, and what captures them."""
