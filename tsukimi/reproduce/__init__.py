"""The experiments of the Mooncake papers, run again by the production scheduler in the simulator."""
