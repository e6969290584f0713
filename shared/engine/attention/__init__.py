"""Attention over paged KV: a protocol (api), a naive reference, and implementations for CPUs and GPUs."""
