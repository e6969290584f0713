"""Puts load on any OpenAI-compatible server and reports what came of it."""
