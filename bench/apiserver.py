"""A stand-in for the API server: a Node, its Events and what DRA needs; by TLS, as in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from npu_agent.simulator.apiserver import StandInApiServer
from tests.kube.helpers import authority, serving


@dataclass
class Node:
    """The Node, as far as the agent asks for it."""

    name: str
    account: Path
    """The service account's directory, as in a Pod."""
    environment: dict[str, str]
    """The variables that tell a Pod where the API server is."""
    labels: dict[str, str] = field(default_factory=dict)
    """Those that the agent has applied."""
    writes: int = 0
    """Requests so far that would change something."""
    requests: int = 0
    """All of them, those too."""
    trouble: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """If set, it answers, whatever is asked."""
    dra: StandInApiServer = field(init=False)
    """Has the ResourceSlices and claims."""

    def __post_init__(self) -> None:
        self.dra = StandInApiServer(self.name)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request of the agent's."""
        self.requests += 1
        if self.trouble:
            return await self.trouble(request)
        self.writes += request.method != "GET"
        whole = request.method == "GET" and "Partial" not in request.headers.get("Accept", "")
        if whole or request.path.startswith("/apis/resource.k8s.io/"):
            return await self.dra.answer(request)
        if request.method != "GET":
            body = await request.json()
            if "/events" in request.path:
                name = request.path.rpartition("/")[2] if request.method == "PATCH" else "an-event"
                return web.json_response({"kind": "Event", "metadata": {"name": name}})
            self.labels = body["metadata"].get("labels", {})
        ours = {
            "manager": "npu-agent",
            "operation": "Apply",
            "fieldsV1": {"f:metadata": {"f:labels": {f"f:{key}": {} for key in self.labels}}},
        }
        only_meta = "PartialObjectMetadata" in request.headers.get("Accept", "")
        return web.json_response(
            {
                "kind": "PartialObjectMetadata" if only_meta else "Node",
                "status": {"nodeInfo": {"kubeletVersion": "v1.36.3"}},
                "metadata": {
                    "name": self.name,
                    "uid": "7b0c",
                    "resourceVersion": str(self.writes),
                    "labels": {"kubernetes.io/hostname": self.name, **self.labels},
                    "managedFields": [ours] if self.labels else [],
                },
            }
        )


@asynccontextmanager
async def node(name: str, directory: Path) -> AsyncIterator[Node]:
    """Serves it meanwhile; certificates and a service account go to `directory`."""
    signed = await asyncio.to_thread(authority, directory / "tls")
    account = directory / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("a-token")
    (account / "ca.crt").write_bytes(signed.ca.read_bytes())
    here = Node(name, account, {})
    async with serving(here.answer, tls=signed.context()) as server:
        host, _, port = server.url.removeprefix("https://").rpartition(":")
        here.environment.update(KUBERNETES_SERVICE_HOST=host, KUBERNETES_SERVICE_PORT=port)
        yield here
