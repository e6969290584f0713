"""The second driver: the machines of shared.core, fed from an event heap instead of a bus.

Nothing here decides anything. Placement, admission, batching, eviction, retries are the very machines that the services
run; this package carries out their commands in simulated time: a cost model for the engine, bandwidth-sharing links for
the network.
"""
