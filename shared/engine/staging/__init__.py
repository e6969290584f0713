"""Copies of KV between a device and the shared memory. They run while the device computes."""
