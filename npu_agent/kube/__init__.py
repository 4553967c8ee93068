"""The Kubernetes API server: the agent's one client, and a module for each kind of object.

Start with `client`. The kinds: `node`, `event`, `access`, `resourceslices`, `resourceclaims`; where
credentials come from: `serviceaccount` in a Pod, `kubeconfig` elsewhere.
"""

from npu_agent.kube.client import USER_AGENT, Api
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kube.node import FIELD_MANAGER, NodeMeta

__all__ = ["FIELD_MANAGER", "USER_AGENT", "Api", "ApiError", "Kind", "NodeMeta"]
