"""The Kubernetes API server: the agent's one client, and what can go wrong with it."""

from npu_agent.kube.client import USER_AGENT, Api
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kube.node import FIELD_MANAGER, NodeMeta

__all__ = ["FIELD_MANAGER", "USER_AGENT", "Api", "ApiError", "Kind", "NodeMeta"]
