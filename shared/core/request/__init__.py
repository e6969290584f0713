"""One choice of a request, as its owner, the gateway, follows it."""
