"""The second driver: the machines of shared.core, fed from an event heap instead of a bus.

Nothing here decides anything. Placement, admission, batching, eviction and retries are decided by the machines that the
services run. This package carries out their commands in simulated time, with a cost model for the engine and
bandwidth-sharing links for the network.
"""
