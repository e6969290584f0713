"""The side that asks: connections to peers, fetches, writes."""
