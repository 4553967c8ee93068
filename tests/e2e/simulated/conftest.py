"""A cluster of its own for simulated cards, with the journey's registry and steps.

Its kubelet has never pulled the agent's image with a password. From 1.35 on, one that has wants the
password for the same image by any name, also for one that is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, workload
from tests.e2e.journey.conftest import bare, node, registry
from tests.e2e.node import started

__all__ = ["bare", "cluster", "node", "registry"]


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, with an image for the Pods of tests and none of those of the pages."""
    with started("warboy=2", workload(), name="npu-simulated") as running:
        yield running
