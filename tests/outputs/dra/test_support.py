"""Whether a node can do DRA, by what the API server says."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web

from npu_agent.kube import Api, ApiError
from npu_agent.outputs.dra.support import Support, support, takes_drivers
from tests.kube.helpers import Reply, kubeconfig, says, serving, status

GROUP = says({"kind": "APIResourceList", "resources": []})


async def asked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, group: Reply, version: str | None
) -> Support:
    info = {"kubeletVersion": version} if version else {}
    meta = {"name": "n1", "uid": "u", "resourceVersion": "1"}
    node = {"kind": "Node", "metadata": meta, "status": {"nodeInfo": info}}

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/apis/resource.k8s.io/v1":
            return await group(request)
        assert request.path == "/api/v1/nodes/n1"
        return await says(node)(request)

    async with serving(handle) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(directory, server.url)))
        api = Api()
        try:
            return await support(api, "n1")
        finally:
            await api.close()


@pytest.mark.parametrize(
    ("group", "version", "available", "reason"),
    [
        (GROUP, "v1.36.3", True, "serves resource.k8s.io/v1, and the kubelet is v1.36.3"),
        (GROUP, "v1.34.0", True, "the kubelet is v1.34.0"),
        (GROUP, "v1.33.9", False, "this node's kubelet is v1.33.9, and DRA needs 1.34 or later"),
        (GROUP, None, False, "this node's kubelet is unknown, and DRA needs 1.34 or later"),
        (status(404, "no"), "v1.36.3", False, "the API server does not serve resource.k8s.io/v1"),
    ],
)
async def test_both_the_api_server_and_the_kubelet_have_to_do_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: Reply,
    version: str | None,
    available: bool,
    reason: str,
) -> None:
    found = await asked(tmp_path, monkeypatch, group, version)
    assert found.available is available
    assert reason in found.reason


async def test_an_api_server_that_does_not_say_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ApiError, match="403"):
        await asked(tmp_path, monkeypatch, status(403, "not you"), "v1.36.3")


@pytest.mark.parametrize(
    ("version", "takes"),
    [("v1.34.0", True), ("1.40", True), ("v2.0.1-x", True), ("v1.9.3", False), ("", False)],
)
def test_versions_of_kubelets(version: str, takes: bool) -> None:
    assert takes_drivers(version) is takes
