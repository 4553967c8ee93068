"""npu-agent: the node agent for NPUs on Kubernetes, one process per node."""

__version__ = "0.1.0"
