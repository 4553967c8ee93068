"""Metrics for Prometheus: of the cards (`cards`), of the agent (`own`), and their exposition."""
