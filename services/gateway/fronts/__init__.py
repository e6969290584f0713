"""How requests arrive and answers leave: HTTP, SSE, WebSocket, NATS."""
