"""Outputs computed from the agent's values, one room each; none imports another."""
