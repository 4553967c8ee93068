"""What Prometheus is told: of the cards (`cards`), of the agent itself (`own`), and the page."""
