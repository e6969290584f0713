"""`tsukimi bench engine`: the engine beside transformers on the same model, the same work, in the same run."""
