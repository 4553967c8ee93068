"""The labels on the Node: their values (`compute`), when they are put (`labeller`), and where."""
