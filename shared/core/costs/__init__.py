"""How long things take: the time model of prefill and decode, presets, its fit, links between nodes."""
