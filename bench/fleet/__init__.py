"""What the agents of a whole cluster ask of its API server: `python -m bench fleet --nodes 300`."""
