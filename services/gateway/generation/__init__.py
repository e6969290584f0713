"""Requests being generated, whichever front asked."""
