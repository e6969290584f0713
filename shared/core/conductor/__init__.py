"""The conductor's decisions: who is there, what they hold, and where each request is placed."""
