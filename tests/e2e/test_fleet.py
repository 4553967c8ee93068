"""The bench of a whole cluster, with four nodes."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.fleet import run
from bench.fleet.run import fleet


@pytest.fixture(autouse=True)
def clean() -> None:
    """No node is needed, so none is started."""


async def test_requests_of_four_nodes_agents_at_a_real_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_CALM", 3.0)
    wanted = Namespace(
        nodes=4,
        each=2,
        start=0.0,
        idle=2.0,
        outages=[],
        spread=0.0,
        partitions=False,
        informers=False,
    )
    found = {one.what: one.measured async for one in fleet(wanted)}
    assert found["watches at the API server, a node"] == "2"
    assert found["agents, idle 2 s: writes"] == "0"
    assert float(found["agents, idle 2 s: requests a node-hour, by the watches' times"]) <= 24
    assert found["a card fails: requests"].startswith("3: ")
    assert found["all agents restart within 0 s: requests a node"].startswith("7: ")
    assert "patch" not in found["all agents restart within 0 s: requests a node"]
