"""What travels: frames, their framing, the handshake, checksums."""
