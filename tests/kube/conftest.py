"""An API server and a client for it, and nothing of this machine's credentials and proxies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from npu_agent.kube import Api, credentials
from tests.kube.helpers import NODE, Authority, Server, authority, client, kubeconfig, says, serving


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: Authority) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials, "DIRECTORY", tmp_path / "serviceaccount")
    # What this system trusts: reading its own 140 authorities takes OpenSSL most of a test.
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted.ca))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))


@pytest.fixture(scope="session")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("trusted"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("other"), "DNS:kubernetes.example")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(says(NODE)) as server:
        yield server


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[Api]:
    async with client(kubeconfig(tmp_path, server.url)) as api:
        yield api
