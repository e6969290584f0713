"""The shell around a worker machine, an engine and a data plane: what prefill and decode services have in common."""
