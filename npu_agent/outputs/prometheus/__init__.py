"""What Prometheus gets: metrics of the cards (`cards`), of the agent (`own`), and the page."""
