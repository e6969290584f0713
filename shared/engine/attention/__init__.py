"""Attention over paged KV: one protocol (api), one naive implementation to compare with, one per kind of device."""
