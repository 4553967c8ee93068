"""The timeline is kept from the feeds of those to whom something happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import ConfigState, LabelState, SessionPhase, SessionStatus
from npu_agent.feed import Feed
from npu_agent.outputs.web.chronicle import Chronicle
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import holdings
from tests.outputs.web.helpers import fenced, held, read
from tests.until import until

SESSION = SessionStatus(resource="npu", phase=SessionPhase.REGISTERED, registrations=1)


@dataclass
class Node:
    """The feeds, and a clock."""

    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(Snapshot()))
    configs: Feed[ConfigState] = field(default_factory=lambda: Feed(ConfigState(loaded_at=0.0)))
    session: Feed[SessionStatus] = field(default_factory=lambda: Feed(SESSION))
    driver: Feed[SessionStatus] = field(
        default_factory=lambda: Feed(replace(SESSION, resource="dra"))
    )
    holdings: Feed[tuple[Usage, ...]] = field(default_factory=lambda: Feed(()))
    labels: Feed[LabelState] = field(default_factory=lambda: Feed(LabelState(output="api")))
    now: float = 1_000.0

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[Chronicle]:
        chronicle = Chronicle(
            version="1.2.3",
            hardware=self.snapshots.map(Snapshot.without_readings),
            snapshots=self.snapshots,
            configs=self.configs,
            sessions=[self.session],
            drivers=[self.driver],
            holdings=self.holdings,
            labels=self.labels,
            clock=lambda: self.now,
        )
        running = asyncio.create_task(chronicle.run())
        try:
            await self.until(chronicle, "npu-agent 1.2.3 started")
            yield chronicle
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def until(self, chronicle: Chronicle, text: str) -> list[str]:
        """All texts, the latest first, as soon as this is one."""

        def texts() -> list[str]:
            return [one.text for one in chronicle.timeline.entries(self.now)]

        await until(lambda: text in texts(), text, interval=0.0)
        return texts()


async def test_all_that_happens_is_noted() -> None:
    node, card, other = Node(), read(state(uuid="A")), read(state(index=1, uuid="B"))
    async with node.followed() as found:
        node.snapshots.publish(Snapshot(cards=(card, other), complete=True))
        node.snapshots.publish(Snapshot(cards=(fenced(card, "dead", 0), other), complete=True))
        await node.until(found, "npu0 became unhealthy: dead")
        node.configs.publish(replace(node.configs.value, error="bad"))
        await node.until(found, "the config file was refused: bad")
        lost = replace(SESSION, phase=SessionPhase.REGISTERING, reason="its stream ended")
        node.session.publish(lost)
        await node.until(found, "the kubelet dropped npu: its stream ended")
        node.driver.publish(replace(node.driver.value, registrations=2))
        await node.until(found, "the kubelet registered dra again")
        node.labels.publish(replace(node.labels.value, error="403"))
        await node.until(found, "the Node's labels were not applied: 403")
        assert other.reading
        worse = replace(other.reading, errors=(("axi_post_error", 3),))
        node.snapshots.publish(
            Snapshot(cards=(fenced(card, "dead", 0), replace(other, reading=worse)), complete=True)
        )
        texts = await node.until(found, "npu1 counted new errors: axi_post_error")
        assert len(texts) == 7
        node.snapshots.publish(Snapshot(cards=(card,), complete=True))
        await node.until(found, "npu1 is gone")
        assert [gone.state.id for gone in found.timeline.gone] == [other.id]
        node.snapshots.publish(Snapshot(cards=(card, other), complete=True))
        await node.until(found, "npu1 was added: FuriosaAI Warboy")
        assert found.timeline.gone == ()


async def test_who_held_a_card_before_the_agent_started_was_not_given_it_now() -> None:
    node, card = Node(), state(uuid="A", id_="A")
    snapshot = Snapshot(cards=(card,), complete=True)
    node.snapshots.publish(snapshot)
    async with node.followed() as found:
        node.now += 5
        node.holdings.publish(holdings(snapshot, held(card, "before")))
        node.configs.publish(replace(node.configs.value, generation=2))
        await node.until(found, "a new config is in force")
        node.now += 10
        node.holdings.publish(holdings(snapshot, held(card, "later")))
        texts = await node.until(found, "default/later was given npu0")
        assert "default/before released npu0" in texts
        assert "default/before was given npu0" not in texts


async def test_a_new_reading_wakes_nobody() -> None:
    """64 cards are read every 5 s: that is no news."""
    node, card = Node(), read(state(uuid="A"))
    async with node.followed() as found:
        node.snapshots.publish(Snapshot(cards=(card,), complete=True))
        assert found._errors.value
        hardware, errors = found._hardware.value, found._errors.value
        node.snapshots.publish(Snapshot(cards=(read(card, temperature=50),), complete=True))
        assert found._hardware.value is hardware
        assert found._errors.value is errors
