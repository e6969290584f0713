"""Where an engine keeps its KVCache."""
