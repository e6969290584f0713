"""How sequences get their KV and their tokens: prefixes fetched, the rest computed in batched steps."""
