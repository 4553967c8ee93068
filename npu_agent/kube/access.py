"""SelfSubjectAccessReview: which rights these credentials have."""

from __future__ import annotations

from npu_agent.kube.client import Api, Request, part, path
from npu_agent.kube.errors import Attempt


async def allowed(
    api: Api, verb: str, resource: str, *, group: str = "", namespace: str = "", name: str = ""
) -> bool:
    """Whether these credentials have this right on a resource, by default of the core group.

    Every authenticated user may ask (ClusterRole system:basic-user).

    Raises:
        ApiError: of any kind.
    """
    right = {"verb": verb, "group": group, "resource": resource}
    right |= {"namespace": namespace, "name": name}
    answer = await api.ask(
        Request(
            attempt=Attempt(
                doing="ask what we are allowed", verb="create", resource="selfsubjectaccessreviews"
            ),
            method="POST",
            path=path("apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"),
            kind="SelfSubjectAccessReview",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": right},
            },
        )
    )
    return part(answer, "status").get("allowed") is True
