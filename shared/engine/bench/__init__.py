"""`tsukimi bench engine`: compares the engine with transformers on the same model and the same work, in one run."""
