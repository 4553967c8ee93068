"""What Prometheus is told: of the cards (`cards`), of the agent itself (`own`), and the page."""

from npu_agent import lean

# Of it, five modules of values are used; the rest, web servers among them, is 1 MB.
lean.package("prometheus_client")
