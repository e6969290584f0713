"""Bulk KVCache blocks between processes: framing (sans-io), transports (tcp, shm), endpoint, arena."""
