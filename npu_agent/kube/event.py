"""core/v1 Events: created, and counted up when they repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_agent.kube.client import Api, Request, part, path
from npu_agent.kube.errors import Attempt, Kind
from npu_agent.kube.node import FIELD_MANAGER


async def create(api: Api, namespace: str, event: Mapping[str, Any]) -> str:
    """Creates an Event; returns its name, which the API server makes if there is a generateName.

    Raises:
        ApiError: of any kind.
    """
    attempt = Attempt(
        doing=f"create an Event in namespace {namespace}", verb="create", resource="events"
    )
    answer = await api.ask(
        Request(
            attempt=attempt,
            method="POST",
            path=path("api", "v1", "namespaces", namespace, "events"),
            kind="Event",
            query={"fieldManager": FIELD_MANAGER},
            body=event,
        )
    )
    name = part(answer, "metadata").get("name")
    if not isinstance(name, str) or not name:
        raise attempt.failed(Kind.GARBAGE, "the API server answered an Event without a name")
    return name


async def patch(api: Api, namespace: str, name: str, changes: Mapping[str, Any]) -> None:
    """Changes an Event by a JSON merge patch.

    Raises:
        ApiError: of any kind; NOT_FOUND if it has expired, which Events do after an hour.
    """
    await api.ask(
        Request(
            attempt=Attempt(
                doing=f"patch Event {namespace}/{name}", verb="patch", resource="events"
            ),
            method="PATCH",
            path=path("api", "v1", "namespaces", namespace, "events", name),
            kind="Event",
            content_type="application/merge-patch+json",
            query={"fieldManager": FIELD_MANAGER},
            body=changes,
        )
    )
