"""Decode steps as CUDA graphs: their sizes, the padding of batches, and the capture."""
