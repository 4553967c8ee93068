"""Whether a node can do DRA, by what the API server says."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_agent.kube import ApiError
from npu_agent.outputs.dra.support import support, takes_drivers
from npu_agent.people.simulator.apiserver import NODES
from tests.kube.helpers import status
from tests.outputs.dra.api import NODE, api_server, cluster


@pytest.mark.parametrize(
    ("served", "version", "available", "reason"),
    [
        (True, "v1.36.3", True, "serves resource.k8s.io/v1, and the kubelet is v1.36.3"),
        (True, "v1.34.0", True, "the kubelet is v1.34.0"),
        (True, "v1.33.9", False, "this node's kubelet is v1.33.9, and DRA needs 1.34 or later"),
        (True, None, False, "this node's kubelet is unknown, and DRA needs 1.34 or later"),
        (False, "v1.36.3", False, "the API server does not serve resource.k8s.io/v1"),
    ],
)
async def test_dra_needs_the_api_server_and_the_kubelet(
    tmp_path: Path, served: bool, version: str | None, available: bool, reason: str
) -> None:
    server = api_server()
    if not served:
        server.groups.clear()
    info = {"kubeletVersion": version} if version else {}
    server.objects[NODES][NODE]["status"]["nodeInfo"] = info
    async with cluster(tmp_path, server) as (_, api):
        answer = await support(api, NODE)
    assert answer.available is available
    assert reason in answer.reason


async def test_an_api_server_that_does_not_say_is_no_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (server, api):
        server.trouble = status(403, "not you")
        with pytest.raises(ApiError, match="403"):
            await support(api, NODE)


@pytest.mark.parametrize(
    ("version", "takes"),
    [("v1.34.0", True), ("1.40", True), ("v2.0.1-x", True), ("v1.9.3", False), ("", False)],
)
def test_versions_of_kubelets(version: str, takes: bool) -> None:
    assert takes_drivers(version) is takes
