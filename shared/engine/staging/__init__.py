"""KV between a device and the shared memory beside it: copies that run while the device computes."""
