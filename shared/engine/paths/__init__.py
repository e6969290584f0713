"""Two ways from token ids to logits: `lean` for Llama's block on the CPU, `general` over transformers' own modules."""
