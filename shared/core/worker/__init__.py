"""The decisions of prefill and decode nodes: attempts, batches, steps, transfers."""
