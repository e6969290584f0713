"""Load on an OpenAI-compatible server, ours or another, and how it bore it."""
