"""What the gateway counts: its own requests, and what nodes tell in their heartbeats."""
