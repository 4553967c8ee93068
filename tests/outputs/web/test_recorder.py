"""The timeline is recorded from the feeds of the agent's parts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from npu_agent.core import changes
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import ConfigState
from npu_agent.core.trends import Trend, TrendKind, Trends
from npu_agent.feed import Feed
from npu_agent.outputs.web.recorder import Recorder
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import holdings
from tests.outputs.web.helpers import fenced, held, read
from tests.until import until


@dataclass
class Node:
    """The feeds, and a clock."""

    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(Snapshot()))
    trends: Feed[Trends] = field(default_factory=lambda: Feed(Trends()))
    configs: Feed[ConfigState] = field(default_factory=lambda: Feed(ConfigState(loaded_at=0.0)))
    holdings: Feed[tuple[Usage, ...]] = field(default_factory=lambda: Feed(()))
    now: float = 1_000.0

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[Recorder]:
        recorder = Recorder(
            "1.2.3",
            self.snapshots.map(Snapshot.without_readings),
            self.trends,
            self.holdings,
            [
                (self.trends, changes.trend_entries),
                (self.configs, changes.config_entries),
            ],
            clock=lambda: self.now,
        )
        running = asyncio.create_task(recorder.run())
        try:
            await self.until(recorder, "npu-agent 1.2.3 started")
            yield recorder
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def until(self, recorder: Recorder, text: str) -> list[str]:
        """All texts, the latest first, as soon as this is one."""

        def texts() -> list[str]:
            return [one.text for one in recorder.timeline.entries(self.now)]

        await until(lambda: text in texts(), text, interval=0.0)
        return texts()


async def test_all_that_happens_is_recorded() -> None:
    node, card, other = Node(), read(state(uuid="A")), read(state(index=1, uuid="B"))
    async with node.recorded() as found:
        node.snapshots.publish(Snapshot(cards=(card, other), complete=True))
        node.snapshots.publish(Snapshot(cards=(fenced(card, "dead", 0), other), complete=True))
        await node.until(found, "npu0 became unhealthy: dead")
        node.configs.publish(replace(node.configs.value, error="bad"))
        await node.until(found, "the config file is refused, the last good one stays in force: bad")
        rise = Trend(card=other, detail="axi_post_error", since=1.0, last=1.0)
        node.trends.publish(Trends({(TrendKind.ERRORS, other.id): rise}))
        texts = await node.until(found, "npu1 counts new errors: axi_post_error")
        assert len(texts) == 4
        node.snapshots.publish(Snapshot(cards=(card,), complete=True))
        await node.until(found, "npu1 is gone")
        assert [gone.state.id for gone in found.timeline.gone] == [other.id]
        node.snapshots.publish(Snapshot(cards=(card, other), complete=True))
        await node.until(found, "npu1 was added: FuriosaAI Warboy")
        assert found.timeline.gone == ()


async def test_a_card_that_was_exchanged_is_gone() -> None:
    node = Node()
    async with node.recorded() as found:
        for id_ in ("A", "B"):
            card = state(uuid=id_, id_=id_)
            node.snapshots.publish(Snapshot(cards=(card,), complete=True))
            await asyncio.sleep(0)
        await node.until(found, "npu0 is another card now: FuriosaAI Warboy, B, in place of A")
        assert [gone.state.id for gone in found.timeline.gone] == ["A"]


async def test_who_held_a_card_before_the_agent_started_was_not_given_it_now() -> None:
    node, card = Node(), state(uuid="A", id_="A")
    snapshot = Snapshot(cards=(card,), complete=True)
    node.snapshots.publish(snapshot)
    async with node.recorded() as found:
        node.now += 5
        node.holdings.publish(holdings(snapshot, held(card, "before")))
        node.configs.publish(replace(node.configs.value, generation=2))
        await node.until(found, "a new config is applied")
        node.now += 10
        node.holdings.publish(holdings(snapshot, held(card, "later")))
        texts = await node.until(found, "default/later was given npu0")
        assert "default/before released npu0" in texts
        assert "default/before was given npu0" not in texts
