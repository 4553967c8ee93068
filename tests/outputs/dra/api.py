"""The stand-in for the API server, and who asks it, for tests of who writes slices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from npu_agent.kube import Api
from npu_agent.people.simulator.apiserver import NODES, SLICES, served
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import client, kubeconfig

NODE = "n1"
DRIVER = "npu.furiosa.ai"


def api_server(node: str = NODE) -> FaultyApiServer:
    """With this node."""
    server = FaultyApiServer(node)
    server.objects[NODES][node]["metadata"]["uid"] = "uid-1"
    return server


def pools(server: FaultyApiServer) -> list[tuple[int, ...]]:
    """After each change: how many slices of the highest generation there were, and should be."""
    found = []
    slices = dict[str, tuple[int, int]]()
    for _, event in server.events[SLICES]:
        name, pool = event["object"]["metadata"]["name"], event["object"]["spec"]["pool"]
        slices[name] = pool["generation"], pool["resourceSliceCount"]
        if event["type"] == "DELETED":
            del slices[name]
        newest = max(slices.values(), default=(0, 0))[0]
        counts = [count for generation, count in slices.values() if generation == newest]
        found.append((len(counts), *sorted(set(counts))))
    return found


@asynccontextmanager
async def cluster(
    directory: Path, server: FaultyApiServer | None = None
) -> AsyncIterator[tuple[FaultyApiServer, Api]]:
    """The server, and a client of it."""
    state = server or api_server()
    async with served(state.answer) as url:
        api = client(kubeconfig(directory, url), 10.0)
        try:
            yield state, api
        finally:
            await api.close()
