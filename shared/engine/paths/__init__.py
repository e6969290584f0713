"""The paths from token ids to logits: `lean` for models of Llama's block on the CPU, `general` over transformers' own
modules, and `graphed`, which adds captured decode steps to the general path."""
