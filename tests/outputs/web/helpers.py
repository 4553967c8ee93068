"""States of an agent made in code, and a server that shows them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import pytest

from npu_agent.core.counts import Counts, DraCounts, Histogram
from npu_agent.core.hardware import (
    CardState,
    Cause,
    CoreRange,
    CoreReading,
    Health,
    HealthState,
    Reading,
    Sensor,
    SensorKind,
    SkippedDevice,
    Snapshot,
)
from npu_agent.core.health import Policy
from npu_agent.core.kinds import NamedCard
from npu_agent.core.ledger import Assignment, PreparedClaim
from npu_agent.core.offer import advertise, device_id
from npu_agent.core.problems import unready
from npu_agent.core.state import (
    AgentState,
    ConfigState,
    DraState,
    Invocation,
    LabelState,
    ResourceState,
    SessionPhase,
    SessionStatus,
    SlicesState,
)
from npu_agent.core.timeline import Timeline, TimelineEntry
from npu_agent.core.trends import Trend, TrendKind, Trends, step
from npu_agent.feed import Feed
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.readers import Readers
from npu_agent.outputs.web.routes import Router, routes
from npu_agent.outputs.web.server import PortLimits, Server
from npu_agent.outputs.web.tls import Certificates
from npu_agent.wording import ENGLISH
from tests.outputs.deviceplugin.helpers import resources
from tests.outputs.deviceplugin.helpers import state as card
from tests.outputs.helpers import DRIVER, RESOURCE, claim, holdings
from tests.until import first

LIMITS = PortLimits()
_ERRORS = """\
/etc/npu-agent/config.yaml:14:3: health.maxTemprature: unknown key: did you mean maxTemperature?
/etc/npu-agent/config.yaml:21:13: metrics.interval: must be a number of seconds, 1 to 3600
""".splitlines()
IN_ITS_POD = Invocation(
    pod="kube-system/npu-agent-x7k2p",
    config_file="/etc/npu-agent/config.yaml",
    host_root="/host",
)
PROMETHEUS = b"# TYPE furiosa_npu_alive gauge\n" + b"".join(
    f'furiosa_npu_alive{{device="npu{number}"}} 1\n'.encode() for number in range(50)
)
"""Large enough to be compressed."""


def reading(
    cores: int = 2,
    *,
    temperature: float = 41.0,
    power: float = 9.5,
    load: float = 15.0,
    age: float = 0.0,
) -> Reading:
    """As a card gives it, `age` seconds ago; core n has a load n per cent above the first."""
    return Reading(
        at=time.monotonic() - age,
        alive=True,
        uptime=90_061,
        sensors=(
            Sensor(SensorKind.TEMPERATURE, "peak", round(temperature * 1_000)),
            Sensor(SensorKind.TEMPERATURE, "ambient", 30_000),
            Sensor(SensorKind.POWER, "rms_total", round(power * 1_000_000)),
        ),
        errors=(("axi_post_error", 0),),
        cores=tuple(
            CoreReading(core=core, utilization=min(100.0, load + core), frequency=2_000)
            for core in range(cores)
        ),
    )


def read(state: CardState, **figures: float) -> CardState:
    """The card with a reading."""
    cores = 8 if state.card.family == "rngd" else 2
    return replace(state, reading=reading(cores, **figures))


def fenced(state: CardState, reason: str, ago: float, cause: Cause | None = None) -> CardState:
    health = replace(
        state.health,
        state=HealthState.UNHEALTHY,
        reason=reason,
        since=time.monotonic() - ago,
        cause=cause,
    )
    return replace(state, health=health)


def held(
    state: CardState, pod: str, cores: CoreRange | None = None, *, namespace: str = "default"
) -> Assignment:
    return Assignment(namespace, pod, "main", RESOURCE, device_id(state.id, cores))


PUBLISHED = SlicesState(published=True, generation=1, slices=1, devices=2, writes=1)


def driver(
    *claims: PreparedClaim,
    phase: SessionPhase = SessionPhase.REGISTERED,
    reason: str = "",
    slices: SlicesState = PUBLISHED,
) -> DraState:
    """A DRA driver with these claims prepared; by default it is registered and published."""
    session = SessionStatus(resource=DRIVER, phase=phase, reason=reason, registrations=1)
    return DraState(session=session, counts=DraCounts(), slices=slices, claims=claims)


@dataclass
class Scene:
    """What the agent knows; a test changes it while the pages are served."""

    cards: tuple[CardState, ...] = ()
    skipped: tuple[SkippedDevice, ...] = ()
    complete: bool = True
    holdings: Holdings = field(default_factory=lambda: Holdings(asked_at=1.0))
    config: ConfigState = field(default_factory=lambda: ConfigState(loaded_at=time.monotonic()))
    stale_after: float = 15.0
    max_temperature: float | None = None
    phase: SessionPhase = SessionPhase.REGISTERED
    reason: str = ""
    registrations: int = 1
    cores: int | None = None
    """Cores of a device; None is the whole card."""
    disabled: frozenset[str] = frozenset()
    labels: LabelState | None = None
    dra: tuple[DraState, ...] = ()
    node: str | None = "node-7"
    invocation: Invocation = IN_ITS_POD
    expected_cards: int | None = None
    recorded: dict[str, frozenset[str]] = field(default_factory=dict)
    version: str = "1.2.3"
    started: float = field(default_factory=lambda: time.monotonic() - 7_300)
    timeline: Timeline = field(default_factory=Timeline)
    lasting: dict[tuple[TrendKind, str], Trend] = field(default_factory=dict)
    """Trends, in addition to those that the cards have now."""
    history: History = field(default_factory=lambda: History(Feed(Snapshot())))
    jump: float = 0.0
    """Seconds by which the wall clock has been set since all this."""
    metrics: bytes | Exception = PROMETHEUS
    """What /metrics answers, or how it fails."""
    fresh: float = 0.0
    """Seconds for which answers are kept."""
    readers: Readers = field(default_factory=Readers)

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(cards=self.cards, skipped=self.skipped, complete=self.complete)

    def unready(self) -> tuple[str, ...]:
        return tuple(map(ENGLISH.unready, unready(self.state())))

    def trends(self) -> Trends:
        policy = Policy(max_temperature=self.max_temperature)
        now = step(Trends(), Snapshot(), self.snapshot, (), time.monotonic(), policy)
        return replace(now, found={**now.found, **self.lasting})

    def lasts(self, kind: TrendKind, card: CardState, ago: float, detail: str = "") -> Self:
        """The scene with this, since so many seconds."""
        since = time.monotonic() - ago
        trend = Trend(
            card=replace(card, reading=None),
            detail=(detail,) if detail else (),
            since=since,
            last=since,
        )
        return replace(self, lasting={**self.lasting, (kind, card.id): trend})

    def state(self) -> AgentState:
        wanted = resources(RESOURCE, self.cores)
        session = SessionStatus(
            resource=RESOURCE,
            phase=self.phase,
            reason=self.reason,
            registrations=self.registrations,
        )
        devices = advertise(self.snapshot, wanted[0], self.disabled)
        return AgentState(
            version=self.version,
            node=self.node,
            hostname=self.node or "a-host",
            invocation=self.invocation,
            expected_cards=self.expected_cards,
            recorded=self.recorded,
            started_at=self.started,
            now=time.time() + self.jump,
            monotonic=time.monotonic(),
            snapshot=self.snapshot,
            usages=holdings(
                self.snapshot,
                *self.holdings.assignments,
                claims=[claim for driver in self.dra for claim in driver.claims],
            ),
            assignments=self.holdings.assignments,
            assignments_error=self.holdings.error,
            resources=(ResourceState(session=session, counts=Counts(), devices=devices),),
            dra=self.dra,
            wanted=wanted,
            disabled=self.disabled,
            config=self.config,
            stale_after=self.stale_after,
            labels=self.labels,
            trends=self.trends(),
            timeline=self.timeline,
            lag=Histogram(()),
        )

    def pages(self) -> Router:
        paths = routes(self._metrics, self.state, self.history, self.readers.touch)
        return Router(paths, fresh=self.fresh)

    def _metrics(self, openmetrics: bool) -> bytes:
        if isinstance(self.metrics, Exception):
            raise self.metrics
        return self.metrics + b"# EOF\n" * openmetrics


def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops both clocks, so that a scene is the same each time."""
    monkeypatch.setattr("time.monotonic", lambda: 500_000.0)
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)


async def listening(server: Server) -> tuple[str, int]:
    address = await first(server.listening, lambda address: address is not None)
    assert address
    return address


@asynccontextmanager
async def running(*parts: Server | Certificates) -> AsyncIterator[None]:
    """Runs these; fails if one ends by itself."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    scene: Scene,
    address: tuple[str, int] = ("127.0.0.1", 0),
    limits: PortLimits = LIMITS,
    certificates: Certificates | None = None,
    authorizer: Authorizer | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """The pages on a port of their own; yields where."""
    server = Server("metrics", address, scene.pages(), limits, certificates, authorizer)
    async with running(server, *([certificates] if certificates else [])):
        yield await listening(server)


def a_day(cards: Sequence[CardState]) -> Timeline:
    """What went before half past three."""
    now, found = time.monotonic(), Timeline()
    gone = card("rngd", 8, uuid="GONE", id_="GONE", serial="RNGD0836FH505KREO")
    npu2, npu5, npu7, npu8 = (NamedCard(f"U{index}", f"npu{index}") for index in (2, 5, 7, 8))
    died = Health(
        state=HealthState.UNHEALTHY, reason="device_state says 0", since=0.0, cause=Cause.DEAD
    )
    hot = replace(died, reason="97.4 °C, above 95 °C", cause=Cause.HOT)
    lost = TimelineEntry("NPUUnhealthy", (npu8,), facts={"why": died}, subject="card")
    dropped = {"service": "beta.furiosa.ai/npu", "reason": "its stream ended"}
    given = {"pod": "playground/notebook-anna"}
    refused = {"error": "config.yaml:14:3: unknown key"}
    errors = {"detail": ("pcie_post_error",)}
    entries: list[tuple[float, TimelineEntry]] = [
        (85_000, TimelineEntry("AgentStarted", facts={"version": "1.2.3"}, subject="agent")),
        (61_000, TimelineEntry("RegistrationLost", facts=dropped, subject="resource")),
        *((50_000 - 120 * at, lost) for at in range(9)),
        (40_100, TimelineEntry("NPUGiven", (npu7,), facts=given, subject="assignments")),
        (30_000, TimelineEntry("ConfigApplied", subject="config")),
        (21_000, TimelineEntry("NPURemoved", (npu8,), subject="card")),
        (5_400, TimelineEntry("ConfigRejected", facts=refused, subject="config")),
        (754, TimelineEntry("NPUUnhealthy", (npu2,), facts={"why": died}, subject="card")),
        (300, TimelineEntry("NPUErrorsRising", (npu2,), facts=errors, subject="errors")),
        (41, TimelineEntry("NPUUnhealthy", (npu5,), facts={"why": hot}, subject="card")),
    ]
    for ago, entry in entries:
        found = found.with_entries([entry], now - ago)
    return found.left([gone], cards, now - 21_000)


def _card_at_night(index: int, **figures: float) -> CardState:
    id_ = f"0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C{index:02X}"
    one = card(
        "rngd",
        index,
        id_=id_,
        uuid=id_,
        serial=f"RNGD0{index}36FH505KREO",
        pci_bus_id=f"0000:{0x17 + 0x10 * index:02x}:00.0",
        numa_node=index // 4,
        driver_version="2025.4.0, 7e25130",
        firmware_version="2025.4.0, c1bebfd",
    )
    one = replace(one, health=replace(one.health, since=time.monotonic() - 266_000))
    return read(
        one,
        **{
            "temperature": 44,
            "power": 52,
            "load": 7.0 * index * (index in (0, 2, 5, 7)),
            **figures,
        },
    )


def night() -> Scene:
    """Half past three: eight RNGD cards, and not all is well."""
    cards = [_card_at_night(index) for index in range(8)]
    dead = fenced(_card_at_night(2, age=754), "device_state says 0", 754, Cause.DEAD)
    assert dead.reading
    cards[2] = replace(dead, reading=replace(dead.reading, errors=(("pcie_post_error", 17),)))
    hot = _card_at_night(5, temperature=97.4, power=148, load=91.0)
    cards[5] = fenced(hot, "97.4 °C, above 95 °C", 41, Cause.HOT)
    silent = replace(cards[6].health, state=HealthState.UNKNOWN, reason="the driver does not say")
    cards[6] = replace(cards[6], health=silent)
    history = History(Feed(Snapshot()))
    for age in range(3_600, -1, -60):
        then = (_card_at_night(at, age=max(age, 754 if at == 2 else 0)) for at in range(8))
        history.add(Snapshot(cards=tuple(then), complete=True))
    return Scene(
        cards=tuple(cards),
        skipped=(
            SkippedDevice(
                "/sys/class/rngd_mgmt/rngd!npu8mgmt", "platform_type is VITIS: an FPGA sample"
            ),
        ),
        holdings=Holdings(
            asked_at=1.0,
            assignments=(
                held(cards[0], "llama-70b-decode-0", namespace="inference"),
                held(cards[2], "whisper-large-5c9d7b6f4-x8kzq", CoreRange(0, 3)),
                held(cards[2], "reranker-7d4f9c-qq2lp", CoreRange(4, 7), namespace="search"),
                held(cards[5], "training-shard-0", namespace="research-team-with-a-long-name"),
                held(cards[7], "notebook-anna", CoreRange(0, 0), namespace="playground"),
            ),
        ),
        config=ConfigState(
            generation=4,
            loaded_at=time.monotonic() - 5_400,
            errors=tuple(_ERRORS),
            rejected=2,
            waiting=("metrics.listen", "resourceName"),
        ),
        labels=LabelState(
            output="api",
            labels={"beta.furiosa.ai/npu.count": "8", "beta.furiosa.ai/npu.product": "rngd"},
            in_place=True,
            applied_at=time.monotonic() - 266_000,
        ),
        max_temperature=95.0,
        timeline=a_day(cards),
        history=history,
        node="npu-rack3-node07.dc1.example.com",
        started=time.monotonic() - 266_020,
    ).lasts(TrendKind.ERRORS, cards[2], 300)


def many(count: int = 64) -> Scene:
    """As many RNGD cards."""
    cards = (card("rngd", at, id_=f"U{at}", uuid=f"U{at}") for at in range(count))
    return Scene(cards=tuple(map(read, cards)))


def hostile(bad: str) -> Scene:
    """This text at every place that can have one from outside."""
    one = fenced(
        card(
            id_=bad,
            uuid=bad,
            serial=bad,
            pci_bus_id=bad,
            driver_version=bad,
            firmware_version=bad,
        ),
        bad,
        1,
    )
    one = read(replace(one, card=replace(one.card, product=bad)))
    assert one.reading
    one = replace(one, reading=replace(one.reading, errors=((bad, 1),)))
    gone = card(index=1, uuid="gone")
    scene = Scene(
        cards=(one,),
        skipped=(SkippedDevice(bad, bad, unread=True),),
        holdings=Holdings(assignments=(held(one, bad, namespace=bad),), error=bad),
        phase=SessionPhase.BLOCKED,
        reason=bad,
        labels=LabelState(output="api", labels={bad: bad}, error=bad),
        dra=(
            driver(
                replace(claim(bad, one, gone, pods=(bad,), request=bad), namespace=bad),
                phase=SessionPhase.BLOCKED,
                reason=bad,
                slices=SlicesState(trouble=bad, dropped=(bad,)),
            ),
        ),
        node=bad,
    )
    scene.config = replace(scene.config, errors=(bad,), waiting=(bad,))
    happened = [TimelineEntry("ConfigRejected", facts={"error": bad}, subject="config")]
    scene.timeline = (
        Timeline().with_entries(happened, time.monotonic()).left([one], [], time.monotonic())
    )
    return scene
