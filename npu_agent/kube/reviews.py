"""Reviews: which rights these credentials have, whose a token is, and what that user may get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from npu_agent.kube.client import Api
from npu_agent.kube.request import Request


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom a token stands for."""

    name: str = msgspec.field(default="", name="username")
    groups: list[str] | None = None
    uid: str | None = None
    extra: dict[str, list[str]] | None = None


class _ReviewStatus(msgspec.Struct, frozen=True):
    """Of an access review, or of a TokenReview."""

    allowed: bool = False
    denied: bool = False
    authenticated: bool = False
    user: User = User()


class _Review(msgspec.Struct, frozen=True):
    status: _ReviewStatus = _ReviewStatus()


async def allowed(
    api: Api, verb: str, resource: str, *, group: str = "", namespace: str = "", name: str = ""
) -> bool:
    """Whether these credentials have this right on a resource, by default of the core group.

    A subresource follows a slash: ``nodes/status``.

    Every authenticated user may ask (ClusterRole system:basic-user).
    """
    resource, _, subresource = resource.partition("/")
    right = {"verb": verb, "group": group, "resource": resource}
    right |= {"namespace": namespace, "name": name}
    if subresource:
        right["subresource"] = subresource
    return (await _ask(api, "SelfSubjectAccessReview", {"resourceAttributes": right})).allowed


async def user_of(api: Api, token: str, *, deadline: float) -> User | None:
    """The user of the token; None: the token is not valid."""
    status = await _ask(api, "TokenReview", {"token": token}, deadline)
    return status.user if status.authenticated and status.user.name else None


async def may_get(api: Api, user: User, url: str, *, deadline: float) -> bool:
    """Whether the user may get this path, as RBAC's nonResourceURLs have it."""
    who = msgspec.to_builtins(user)
    spec = {"user": who.pop("username"), **who}
    spec["nonResourceAttributes"] = {"path": url, "verb": "get"}
    status = await _ask(api, "SubjectAccessReview", spec, deadline)
    return status.allowed and not status.denied


async def _ask(
    api: Api, kind: str, spec: Mapping[str, Any], deadline: float | None = None
) -> _ReviewStatus:
    group = "authentication" if kind == "TokenReview" else "authorization"
    body = {"apiVersion": f"{group}.k8s.io/v1", "kind": kind, "spec": spec}
    request = Request("create", kind, _Review, body=body)
    return (await api.ask(request, deadline=deadline)).status
