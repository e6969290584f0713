"""The user's toolbox: local cluster, status, chat, benchmarks. Starts services as processes, never imports them."""
