"""Users' own classes: found by name, and tried before anything depends on them."""
