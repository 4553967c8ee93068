"""What is computed from the agent's values, one room an output; none imports another."""
