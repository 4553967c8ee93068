"""The agent of a node: `parts` builds it, `agent` makes its state, `run` runs and ends it."""
