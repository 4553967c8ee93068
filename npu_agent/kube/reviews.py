"""TokenReview and SubjectAccessReview: whose token this is, and what that user may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.kube.client import Api, Request, part, path
from npu_agent.kube.errors import Attempt


@dataclass(frozen=True, slots=True)
class User:
    """Whom a token stands for: ``status.user`` of a TokenReview."""

    name: str
    fields: Mapping[str, Any]
    """``groups``, ``uid`` and ``extra``, as a SubjectAccessReview takes them."""


async def user_of(api: Api, token: str, *, deadline: float) -> User | None:
    """Whose token this is; None: nobody's.

    Raises:
        ApiError: of any kind.
    """
    answer = await _create(
        api, "authentication.k8s.io", "TokenReview", {"token": token}, deadline=deadline
    )
    status, user = part(answer, "status"), part(answer, "status", "user")
    name = user.get("username")
    if status.get("authenticated") is not True or not isinstance(name, str) or not name:
        return None
    return User(name, {key: user[key] for key in ("groups", "uid", "extra") if key in user})


async def may_get(api: Api, user: User, url: str, *, deadline: float) -> bool:
    """Whether the user may get this path, as RBAC's nonResourceURLs have it.

    Raises:
        ApiError: of any kind.
    """
    wanted = {"path": url, "verb": "get"}
    spec = {"user": user.name, **user.fields, "nonResourceAttributes": wanted}
    answer = await _create(
        api, "authorization.k8s.io", "SubjectAccessReview", spec, deadline=deadline
    )
    status = part(answer, "status")
    return status.get("allowed") is True and status.get("denied") is not True


async def _create(
    api: Api, group: str, kind: str, spec: Mapping[str, Any], *, deadline: float
) -> dict[str, Any]:
    resource = f"{kind.lower()}s"
    request = Request(
        attempt=Attempt(doing=f"create a {kind}", verb="create", resource=resource),
        method="POST",
        path=path("apis", group, "v1", resource),
        kind=kind,
        body={"apiVersion": f"{group}/v1", "kind": kind, "spec": spec},
    )
    return await api.ask_apart(request, deadline=deadline)
