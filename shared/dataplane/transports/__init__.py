"""Ways to move frames and pages between two processes, behind one protocol (transports.base)."""
