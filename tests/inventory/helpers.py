"""Simulated trees, changed by hand where no fault does it, and an Inventory on one."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.feed import Feed
from npu_agent.inventory.card import ProbeSettings
from npu_agent.inventory.inventory import Inventory
from npu_agent.inventory.uevents import KernelNews
from npu_agent.people import simulator
from npu_agent.people.simulator.replay import load
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.until import first

QUICK = ProbeSettings(interval=0.02, health_interval=0.01, telemetry_interval=0.01)
READINGS = ProbeSettings(interval=0.02, health_interval=0.05, telemetry_interval=0.25)
"""Slow enough for each reading to become a Snapshot."""


def tree(root: Path, cards: str) -> Path:
    """A simulated driver tree such as ``warboy=2,rngd=1``."""
    simulator.make(root, simulator.parse_cards(cards), plain_nodes=True)
    return root


def replayed(root: Path, record: Path) -> Path:
    """A tree that shows what `npu-agent record` wrote on a host."""
    found = load(record)
    simulator.show(root, found.picture(), found.manifest.directories)
    return root


def management(root: Path, index: int, family: str = "warboy") -> Path:
    """The management directory of a simulated card, by its real path."""
    entry = f"rngd!npu{index}mgmt" if family == "rngd" else f"npu{index}_mgmt"
    return root / "sys/devices/virtual" / FAMILIES[family].class_dir / entry


def write(path: Path, content: bytes | str | None) -> None:
    """Gives a file other content, or takes it away, whatever was there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def bare_card(root: Path, index: int, uuid: str) -> None:
    """The least that is a Warboy: for trees of many cards."""
    directory = root / f"sys/class/npu_mgmt/npu{index}_mgmt"
    directory.mkdir(parents=True)
    (directory / "device_type").write_text("Warboy\n", encoding="utf-8")
    (directory / "device_uuid").write_text(uuid, encoding="utf-8")
    (directory / "alive").write_text("1\n", encoding="utf-8")


class Record(Feed[Snapshot]):
    """A feed that remembers every Snapshot: a reader of a feed may miss some."""

    def __init__(self) -> None:
        super().__init__(Snapshot())
        self.all: list[Snapshot] = []

    def publish(self, value: Snapshot) -> bool:
        changed = super().publish(value)
        if changed:
            self.all.append(value)
        return changed


class Watched:
    """An Inventory on a tree, and what it published."""

    def __init__(
        self, root: Path, vendor: Furiosa | None = None, settings: ProbeSettings = QUICK
    ) -> None:
        self.root = root
        self.settings = Feed(settings)
        self.kernel = Feed(KernelNews())
        self.restarts: Counter[str] = Counter()
        self.inventory = Inventory(
            vendor or Furiosa(root), self.settings, self.kernel, restarts=self.restarts
        )
        self.record = self.inventory.snapshots = Record()

    def fault(self, card: str, name: str) -> None:
        simulator.apply_fault(self.root, card, name)

    async def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """The first Snapshot from now on that fulfils `condition`."""
        return await first(self.record, lambda s: s.complete and condition(s))

    async def card(self, name: str, state: HealthState) -> CardState:
        """The card of that name, as soon as it has that health."""
        snapshot = await self.until(
            lambda s: any(c.card.name == name and c.health.state is state for c in s.cards)
        )
        return next(c for c in snapshot.cards if c.card.name == name)

    async def names(self, *names: str) -> Snapshot:
        """The Snapshot with exactly these cards, as soon as it is there."""
        return await self.until(lambda s: tuple(c.card.name for c in s.cards) == names)

    async def looks(self, count: int = 5) -> None:
        """Returns after each card had `count` full readings more."""
        for _ in range(count):
            before = {c.id: c.reading.at for c in self.record.value.cards if c.reading}
            await self.until(
                lambda s, before=before: all(  # type: ignore[misc]
                    c.reading and c.reading.at > before.get(c.id, 0.0) for c in s.cards
                )
            )


@asynccontextmanager
async def watching(
    root: Path, vendor: Furiosa | None = None, settings: ProbeSettings = QUICK
) -> AsyncIterator[Watched]:
    """An Inventory that runs meanwhile, with a complete first Snapshot."""
    watched = Watched(root, vendor, settings)
    running = asyncio.create_task(watched.inventory.run())
    try:
        await watched.until(lambda _: True)
        yield watched
        assert not running.done(), "the inventory ended by itself"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
