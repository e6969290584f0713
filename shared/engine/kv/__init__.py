"""The memory in which an engine keeps its KV cache."""
