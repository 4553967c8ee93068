"""Attacks on a whole agent: what is done to it, and what has to hold. `make chaos` plays them.

Start at `attacks/`: a function an attack. `table.py` is what they are entered into, `world.py` the
agent that is attacked and what has to hold after each, `__main__.py` plays them and prints the
results. docs/dev/reliability.md names the classes of faults. The agent is a process of its own,
with stand-ins for the kubelet and the API server; what needs the real kubelet is played by
tests/e2e.
"""
