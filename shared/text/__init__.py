"""Converts prompts to token ids, and token ids to text. Does not import torch."""
