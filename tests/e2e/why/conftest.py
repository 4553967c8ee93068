"""A real API server and scheduler; the Nodes are objects, and nothing answers for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.e2e.api import ADMIN, MERGE
from tests.e2e.node import started


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Without a controller manager, which would taint Nodes that have no kubelet."""
    with started("warboy=1", name="npu-why") as running:
        running._sandbox.kill(running._state.processes["controller-manager"])
        label = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
        path, headers = "/api/v1/namespaces/default", {"Content-Type": MERGE}
        assert running.request("PATCH", path, label, token=ADMIN, headers=headers).status == 200
        yield running


@pytest.fixture(autouse=True)
def clean() -> None:
    """Nothing is left to do: each test has names of its own."""
