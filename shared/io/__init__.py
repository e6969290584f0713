"""Shells: bus (NATS and in-process), driver, service runner, config, logging, metrics."""
