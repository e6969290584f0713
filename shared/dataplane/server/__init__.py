"""The side that answers: reads, landings, the pool."""
