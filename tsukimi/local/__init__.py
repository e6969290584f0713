"""A whole cluster on one machine: planned, started, watched, restarted and stopped."""
