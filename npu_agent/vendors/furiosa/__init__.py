"""FuriosaAI: every word of this vendor's drivers, nodes, environment, labels and metrics."""
