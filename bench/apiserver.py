"""The stand-in for the API server, by TLS and with a service account, as in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from npu_agent.people.simulator.apiserver import NODES, served
from tests.kube.apiserver import FaultyApiServer, applied
from tests.kube.helpers import authority


class Node(FaultyApiServer):
    """The API server of one node."""

    def __init__(self, name: str, account: Path) -> None:
        """`account` is the service account's directory, as in a Pod."""
        super().__init__(name)
        self.account = account
        self.environment: dict[str, str] = {}
        """The variables that tell a Pod where the API server is."""

    @property
    def labels(self) -> frozenset[str]:
        """Those that the agent has applied."""
        return applied(self.objects[NODES][self.node])

    def lose_labels(self) -> None:
        """Another client takes the agent's labels off the Node."""
        meta = self.objects[NODES][self.node]["metadata"]
        meta.update(labels={}, managedFields=[])


@asynccontextmanager
async def node(name: str, directory: Path) -> AsyncIterator[Node]:
    """Serves it meanwhile; certificates and a service account go to `directory`."""
    signed = await asyncio.to_thread(authority, directory / "tls")
    account = directory / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("a-token", encoding="utf-8")
    (account / "ca.crt").write_bytes(signed.ca.read_bytes())
    here = Node(name, account)
    async with served(here.answer, signed.context()) as url:
        host, _, port = url.removeprefix("https://").rpartition(":")
        here.environment.update(KUBERNETES_SERVICE_HOST=host, KUBERNETES_SERVICE_PORT=port)
        yield here
