"""The Kubernetes API server: the agent's one client, and a module for each kind of object.

Start with `client`, `request` and `credentials`. Every failure is an `ApiError`.
"""

from npu_agent.kube.client import FIELD_MANAGER, USER_AGENT, Api, Timing
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kube.node import Node, NodeMeta

__all__ = [
    "FIELD_MANAGER",
    "USER_AGENT",
    "Api",
    "ApiError",
    "Kind",
    "Node",
    "NodeMeta",
    "Timing",
]
