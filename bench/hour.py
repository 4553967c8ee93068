"""What a real API server is asked by one idle agent with DRA, labels and Events."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.figure import Figure
from tests.cluster import Cluster, agent
from tests.e2e.node import NAMESPACE, SOON, Node, simulated

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:npu-agent"
CARDS = 8


async def hour(minutes: float) -> AsyncIterator[Figure]:
    """Counts for so many minutes; root, and `make e2e`'s programs. The node idles meanwhile."""
    with _cluster() as cluster:
        since = len(_asked(cluster))
        await asyncio.sleep(60 * minutes)
        asked = _asked(cluster)[since:]
    counts = Counter(f"{one['verb']} {_what(one)}" for one in asked)
    kinds = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    writes = sum(one["verb"] not in ("get", "list", "watch") for one in asked)
    hourly = 60 / minutes
    yield Figure("requests to the API server, node-hour", f"{len(asked) * hourly:g}", "<= 24")
    yield Figure("of these writes", f"{writes * hourly:g}", "0")
    yield Figure("watches at the same time", f"{_most_at_once(asked)}", "<= 2")
    yield Figure(f"in {minutes:g} minutes", kinds)


@contextmanager
def _cluster() -> Iterator[Cluster]:
    """One node whose agent has published its cards; the kubelet has its default settings."""
    with (
        tempfile.TemporaryDirectory(prefix="npu-hour-", dir="/tmp") as workdir,
        Cluster.start(Path(workdir), node_name="npu-hour") as cluster,
        simulated(cluster, f"rngd={CARDS}"),
    ):
        cluster.import_image(agent().archive)
        node = Node(cluster)
        node.deploy({"allocation": {"api": "dra"}}, "tests/e2e/dra")
        cluster.wait_for("all cards to be published", lambda: _published(cluster), 2 * SOON)
        yield cluster


def _published(cluster: Cluster) -> bool:
    slices = json.loads(cluster.kubectl("get", "resourceslices", "--output=json"))["items"]
    return sum(len(one["spec"].get("devices", ())) for one in slices) == CARDS


def _asked(cluster: Cluster) -> list[dict[str, Any]]:
    """What the agent has asked, from the audit log; a watch is there once it has ended."""
    return [one for one in cluster.audit() if one["user"]["username"] == ACCOUNT]


def _what(one: dict[str, Any]) -> str:
    """The resource, or the path of what is none."""
    return str(one.get("objectRef", {}).get("resource", one["requestURI"]))


def _most_at_once(asked: list[dict[str, Any]]) -> int:
    watches = [one for one in asked if one["verb"] == "watch"]
    begun = [(_time(one, "requestReceivedTimestamp"), 1) for one in watches]
    ended = [(_time(one, "stageTimestamp"), -1) for one in watches]
    now = most = 0
    for _, change in sorted(begun + ended):
        now += change
        most = max(most, now)
    return most


def _time(one: dict[str, Any], which: str) -> datetime:
    return datetime.fromisoformat(one[which])
