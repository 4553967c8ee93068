"""The figures of the agent, measured from outside: ``python -m bench``."""
