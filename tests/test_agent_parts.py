"""The whole agent with cards that are cut on demand: the config, the API server, claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_agent.config.schema import DraConfig
from npu_agent.outputs.dra import claims, publisher
from npu_agent.people.simulator.cards import card
from npu_agent.people.simulator.pluginmanager import PrepareError
from tests.outputs.dra.api import DRIVER, pools
from tests.test_agent_dra import DRA, NODE, NOTHING_ELSE, Room, room, timing
from tests.until import until

__all__ = ["room"]  # the fixture


@pytest.fixture(autouse=True)
def _impatient(room: Room) -> None:
    """Nothing waits for holders: they stay. Nor between two rounds of writes."""
    room.node.timing = timing(
        claims=claims.PrepareTiming(holder_ends=0.0), slices=publisher.SliceTiming(gap_longest=0.1)
    )


CARD = f"npu-{card('rngd', 0).uuid.lower()}"
PART = f"{CARD}-cores-0-3"
CUT = DraConfig(partitions=True)


def tainted(room: Room) -> dict[str, list[str]]:
    return {
        name: [taint["key"].removeprefix(f"{DRIVER}/") for taint in taints]
        for name, taints in room.cluster.taints().items()
    }


async def test_a_part_that_is_held_when_the_config_has_no_parts_any_more(room: Room) -> None:
    """And again and again: the cores are its holder's at any moment."""
    room.node.cards("rngd=1")

    def configure(partitions: str) -> Path:
        by_dra = "allocation: {api: dra}\nhealth: {interval: 0.05}\n"
        return room.configure(f"{by_dra}dra: {{partitions: {partitions}}}\n")

    async with room.node.agent(config_file=configure("true")) as agent:

        def change(partitions: str) -> None:
            configure(partitions)
            agent.common.poller.read_now()

        await until(lambda: len(room.cluster.devices()) == 15)
        await room.registered()
        claim = room.claim("c", PART)
        before = await room.prepared(claim)
        assert not room.cluster.taints()  # the scheduler knows, by the counters

        change("false")
        await room.offered(CARD)
        await until(lambda: tainted(room) == {CARD: ["held"]})
        # The kubelet hears of the health of what is held, whether it is offered or not.
        room.node.fault("npu0", "dead")
        await until(lambda: room.manager.state(DRIVER, NODE, PART)[0] == "Unhealthy")
        room.node.fault("npu0", "ok")
        await until(lambda: room.manager.state(DRIVER, NODE, PART)[0] == "Healthy")
        await until(lambda: tainted(room) == {CARD: ["held"]})
        assert await room.prepared(claim) == before  # as after a restart of the kubelet
        with pytest.raises(PrepareError, match=r"Pod team/pod-c .* still holds its cores"):
            await room.prepared(room.claim("whole", CARD))

        change("true")
        await until(lambda: len(room.cluster.devices()) == 15 and not room.cluster.taints())
        with pytest.raises(PrepareError, match=r"Pod team/pod-c .* still holds its cores"):
            await room.prepared(room.claim("overlaps", f"{CARD}-cores-2"))
        await room.prepared(room.claim("beside", f"{CARD}-cores-4-7"))

        change("false")
        await until(lambda: tainted(room) == {CARD: ["held"]})
        for name in ("c", "beside"):
            await room.manager.unprepare(DRIVER, room.claim(name, PART))
        await room.free(CARD)
        assert agent.state().dra[0].claims == ()
        # A pool of overlapping devices was never complete without its counters.
        assert all(len(counts) == 2 for counts in pools(room.cluster))


async def test_an_unhealthy_card_where_the_api_server_drops_taints(room: Room) -> None:
    """The scheduler takes cores for free of which it sees no device that is allocated."""
    room.cluster.dropped = {"taints"}
    room.node.cards("rngd=1")
    async with room.node.agent(allocation=DRA, dra=CUT, **NOTHING_ELSE):
        await until(lambda: len(room.cluster.devices()) == 15)
        node = room.node.root / "dev/rngd/npu0pe3"
        node.rename(node.with_name("elsewhere"))
        await room.offered()  # also its other cores: a card without a node is out of service
        node.with_name("elsewhere").rename(node)
        await until(lambda: len(room.cluster.devices()) == 15)
        room.node.fault("npu0", "dead")
        await room.offered()
        assert all(len(counts) == 2 for counts in pools(room.cluster))
