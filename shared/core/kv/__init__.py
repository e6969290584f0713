"""KVCache blocks: their keys, a node's pool of them, eviction, and the events that report them."""
