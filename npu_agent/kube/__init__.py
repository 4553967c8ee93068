"""The Kubernetes API server: the agent's one client, and a module for each kind of object.

Start with `client`, `request` and `credentials`. Every failure is an `ApiError`.
"""

from npu_agent.kube.client import Api
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.node import NodeMeta, ThisNode

__all__ = ["Api", "ApiError", "ErrorKind", "NodeMeta", "ThisNode"]
