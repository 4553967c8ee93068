"""What is recorded, which Events there are, and how they reach an API server that is away."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from npu_agent import __version__
from npu_agent.core import changes
from npu_agent.core.cordon import Cordons
from npu_agent.core.hardware import CardState, CoreRange, Health, HealthState, Snapshot
from npu_agent.core.kinds import Problem
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.core.problems.cards import TRENDS
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from npu_agent.core.timeline import TimelineEntry
from npu_agent.core.trends import Trend, TrendKind, Trends
from npu_agent.feed import Feed
from npu_agent.kube import ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.outputs.events import (
    Event,
    EventLimits,
    Events,
    TimelineWriter,
    _Queued,
    _request,
    events,
)
from npu_agent.supervise import background
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.wording import ENGLISH
from tests.kube.apiserver import FaultyApiServer
from tests.outputs.helpers import DirectApi
from tests.until import first, until

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def card(index: int, state: HealthState = HealthState.HEALTHY, reason: str = "works") -> CardState:
    return CardState(
        id=f"UUID-{index}",
        card=FAMILIES["warboy"].card(index, product="warboy", pci_bus_id=f"0000:0{index}:00.0"),
        health=Health(state=state, reason=reason, since=0.0),
    )


def snapshot(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


def dead(index: int, reason: str = "alive says 0") -> CardState:
    return card(index, HealthState.UNHEALTHY, reason)


def config(error: str | None = None) -> ConfigState:
    return ConfigState(loaded_at=0.0, errors=(error,) if error else ())


def card_events(before: Snapshot, after: Snapshot, usages: Collection[Usage] = ()) -> list[Event]:
    entries = changes.card_entries(changes.card_changes(before, after))
    return [*events(entries, (*before.cards, *after.cards), usages)]


# Which there are: their sentences are those of the timeline (tests/core/test_changes.py).

ONE, BOTH = snapshot(card(0)), snapshot(card(0), card(1))
NAMED = "npu0 (UUID-0, 0000:00:00.0)"
REMEDY = ENGLISH.of_cause(None).remedy
GONE = ENGLISH.remedy(Problem("CardMissing"))


@pytest.mark.parametrize(
    ("before", "after", "reason", "message", "warning"),
    [
        (ONE, snapshot(dead(0)), "NPUUnhealthy", f"became unhealthy: alive says 0: {REMEDY}", True),
        (snapshot(dead(0)), ONE, "NPURecovered", "recovered: works", False),
        (ONE, snapshot(), "NPURemoved", f"is gone: {GONE}", True),
        (snapshot(), ONE, "NPUAdded", "was added: FuriosaAI Warboy", False),
    ],
)
def test_a_change_has_the_identity_of_its_card_and_a_remedy(
    before: Snapshot, after: Snapshot, reason: str, message: str, warning: bool
) -> None:
    expected = Event(reason=reason, message=f"{NAMED} {message}", warning=warning)
    assert card_events(before, after) == [expected]


def test_a_card_that_is_exchanged_is_one_event_and_one_that_is_renumbered_none() -> None:
    (event,) = card_events(ONE, snapshot(replace(card(0), id="OTHER")))
    now = "is another card now: FuriosaAI Warboy, OTHER, in place of UUID-0"
    assert (event.reason, event.message) == ("NPUExchanged", f"npu0 (OTHER, 0000:00:00.0) {now}")
    moved = replace(card(1), card=replace(card(1).card, index=4))
    assert card_events(BOTH, snapshot(card(0), moved)) == []


def used(index: int, pod: str) -> Usage:
    assignment = Assignment("ml", pod, "main", "furiosa.ai/warboy", f"UUID-{index}")
    return Usage(f"UUID-{index}", CoreRange(0, 1), assignment)


def test_an_event_of_a_card_names_the_pods_that_use_it() -> None:
    pods = (used(0, "b"), used(0, "a"), used(1, "other"))
    (died,) = card_events(snapshot(card(0)), snapshot(dead(0)), usages=pods)
    assert "alive says 0; in use by ml/a, ml/b: " in died.message
    (left,) = card_events(snapshot(card(0)), snapshot(), usages=pods)
    assert "is gone; in use by ml/a, ml/b: " in left.message
    assert {event.pods for event in (died, left)} == {("ml/a", "ml/b")}


def test_a_trend_is_an_event_at_its_beginning_and_at_its_end() -> None:
    trend = Trend(card=card(0), detail=("above 90 °C",), since=1.0, last=1.0)
    for kind in TrendKind:
        lasts = Trends({(kind, "UUID-0"): trend})
        (began,) = events(changes.trend_entries(Trends(), lasts), [card(0)])
        (ended,) = events(changes.trend_entries(lasts, Trends()), [card(0)])
        assert (began.warning, ended.warning) == (True, False)
        assert began.message.startswith(f"{NAMED} ")
        assert began.message.endswith(f": {ENGLISH.remedy(Problem(TRENDS[kind]))}")
        assert ended.message.startswith(f"{NAMED} ")


def test_a_cordon_is_what_a_person_wants_and_no_warning() -> None:
    cordoned = Cordons(cards={"UUID-0": "swap fan"}, present={"UUID-0": "npu0"})
    (event,) = events(changes.cordon_entries(Cordons(), cordoned), [card(0)], [used(0, "a")])
    assert event == Event(
        reason="NPUCordoned",
        message=f"{NAMED} was cordoned, no new Pod gets it: swap fan",
        warning=False,
    )


def test_a_card_without_any_identity_is_named_once() -> None:
    bare = replace(card(0), id="npu0", card=replace(card(0).card, pci_bus_id=None))
    (event,) = card_events(snapshot(), snapshot(bare))
    assert event.message == "npu0 was added: FuriosaAI Warboy"


def driver(phase: SessionPhase = SessionPhase.REGISTERED, reason: str = "") -> SessionStatus:
    return SessionStatus(resource="npu.furiosa.ai", phase=phase, reason=reason)


BLOCKED = driver(SessionPhase.BLOCKED, "the kubelet refuses: no")
AGAIN = driver(SessionPhase.BLOCKED, "another")


@pytest.mark.parametrize(
    ("entries", "reasons"),
    [
        (changes.config_entries(config(), config("c.yaml:3: no")), ["ConfigRejected"]),
        (changes.config_entries(config("x"), config()), []),
        (changes.session_entries(driver(), BLOCKED, "dra"), ["DRANotServed"]),
        (changes.session_entries(BLOCKED, AGAIN, "dra"), ["DRANotServed"]),
        (changes.session_entries(BLOCKED, driver(), "dra"), []),
        (changes.session_entries(driver(), driver(SessionPhase.STANDBY), "dra"), []),
        # At each start, until the API server has answered: it is taken back by nothing.
        (changes.session_entries(driver(), driver(SessionPhase.WAITING), "dra"), []),
    ],
)
def test_a_refused_config_and_a_driver_that_is_not_served_are_warnings(
    entries: Iterable[TimelineEntry], reasons: list[str]
) -> None:
    assert [(event.reason, event.warning) for event in events(entries)] == [
        (reason, True) for reason in reasons
    ]


# How they get there.


class Server(DirectApi):
    """Has one Node, and keeps Events."""

    def __init__(self) -> None:
        super().__init__(FaultyApiServer("node-1"))
        self.objects = self.server.objects["/api/v1/namespaces/default/events"]

    def refuse(self, kind: ErrorKind | None, card: str = "") -> None:
        """Refuses everything so from now on, or what is about a card, as a webhook does."""

        def refused(request: Request[Any]) -> ApiError | None:
            about = card in str(request.body)
            return ApiError(f"it went wrong: {kind.name}", kind=kind) if kind and about else None

        self.refused = refused

    async def reached(self, number: int) -> None:
        await first(self.calls, lambda calls: calls >= number)

    def table(self) -> list[tuple[str, int]]:
        return [(each["reason"], each["count"]) for each in self.objects.values()]


@dataclass
class Room:
    server: Server = field(default_factory=Server)
    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(BOTH))
    trends: Feed[Trends] = field(default_factory=lambda: Feed(Trends()))
    configs: Feed[ConfigState] = field(default_factory=lambda: Feed(config()))
    wanted: Feed[bool] = field(default_factory=lambda: Feed(True))
    driver: Feed[SessionStatus] = field(default_factory=lambda: Feed(driver()))
    usages: Feed[tuple[Usage, ...]] = field(default_factory=lambda: Feed(()))
    now: float = 1_000.0

    @asynccontextmanager
    async def running(self, **limits: float) -> AsyncIterator[Events]:
        events = Events(
            api=self.server,
            node_name="node-1",
            wanted=self.wanted,
            limits=replace(EventLimits(longest_pause=0.01), **limits),  # type: ignore[arg-type]
        )
        self.recorder = TimelineWriter(
            self.snapshots,
            self.trends,
            self.usages,
            [
                (self.trends, changes.trend_entries),
                (self.configs, changes.config_entries),
                (self.driver, partial(changes.session_entries, subject="dra")),
            ],
            events,
            clock=lambda: self.now,
        )
        async with background(events.run(), self.recorder.run()):
            await self.seen()
            yield events

    def texts(self) -> set[str]:
        """All that is recorded."""
        return {ENGLISH.text(entry) for entry in self.recorder.timeline.entries(self.now)}

    async def show(self, *cards: CardState) -> None:
        """The hardware changes, and the change is seen."""
        self.snapshots.publish(snapshot(*cards))
        await self.seen()

    async def second_fails(self) -> None:
        """The second card fails as the first one; of this alone there is an Event."""
        await self.show(dead(0), dead(1))
        await until(lambda: self.server.objects)
        (event,) = self.server.objects.values()
        assert "npu1" in event["message"]

    async def seen(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def room() -> Room:
    return Room()


async def test_all_that_happens_is_recorded(room: Room) -> None:
    room.snapshots = Feed(Snapshot())
    async with room.running():
        await room.show(card(0), card(1))
        await room.show(dead(0), card(1))
        room.configs.publish(config("bad"))
        await room.seen()
        rise = Trend(card=card(1), detail=("axi_post_error",), since=1.0, last=1.0)
        room.trends.publish(Trends({(TrendKind.ERRORS, "UUID-1"): rise}))
        await room.seen()
        assert room.texts() == {
            "npu1 counts new errors: axi_post_error",
            "the config file is refused, the last good one stays in force: bad",
            "npu0 became unhealthy: alive says 0",
            f"npu-agent {__version__} started",
        }
        await room.show(card(0))
        assert [gone.state.id for gone in room.recorder.timeline.gone] == ["UUID-1"]
        await room.show(card(0), card(1))
        assert room.recorder.timeline.gone == ()


async def test_a_card_that_was_exchanged_is_gone(room: Room) -> None:
    first, other = (
        replace(card(0), id=uuid, card=replace(card(0).card, uuid=uuid))
        for uuid in ("UUID-0", "OTHER")
    )
    room.snapshots = Feed(Snapshot())
    async with room.running():
        await room.show(first)
        await room.show(other)
        text = "npu0 is another card now: FuriosaAI Warboy, OTHER, in place of UUID-0"
        assert text in room.texts()
        assert [gone.state.id for gone in room.recorder.timeline.gone] == ["UUID-0"]


async def test_a_pod_that_held_a_card_before_the_agent_started_was_not_given_it_now(
    room: Room,
) -> None:
    async with room.running():
        room.now += 5
        room.usages.publish((used(0, "before"),))
        await room.seen()
        room.now += 10
        room.usages.publish((used(0, "later"),))
        await room.seen()
        assert {"ml/before released npu0", "ml/later was given npu0"} < room.texts()
        assert "ml/before was given npu0" not in room.texts()


async def test_of_a_card_that_flaps_there_is_no_event_for_each_change(room: Room) -> None:
    trend = Trend(card=card(0), detail=("5 times",), since=1.0, last=1.0)
    async with room.running():
        room.trends.publish(Trends({(TrendKind.FLAPPING, "UUID-0"): trend}))
        await room.show(dead(0), dead(1))
        await until(lambda: room.server.table() == [("NPUUnhealthy", 1), ("NPUFlapping", 1)])
    (unhealthy, _) = room.server.objects.values()
    assert unhealthy["message"].startswith("npu1 ")


async def test_a_driver_that_fails_the_same_way_again_and_again_is_one_event(room: Room) -> None:
    async with room.running():
        for _ in range(3):
            room.driver.publish(driver(SessionPhase.BLOCKED, "no directory"))
            await room.seen()
            room.driver.publish(driver(SessionPhase.REGISTERING))
            await room.seen()
        assert room.server.table() == [("DRANotServed", 1)]
        room.driver.publish(driver())
        await room.seen()
        room.driver.publish(driver(SessionPhase.BLOCKED, "no directory"))
        await until(lambda: room.server.table() == [("DRANotServed", 2)])


async def test_an_event_is_about_the_node_and_names_its_sender(room: Room) -> None:
    async with room.running():
        await room.show(dead(0), card(1))
        (event,) = room.server.objects.values()
    # As the kubelet's Events have it.
    about = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"}
    assert event["involvedObject"] == about
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "NPUUnhealthy", 1)
    assert event["source"] == {"component": "npu-agent", "host": "node-1"}
    assert event["metadata"]["name"].startswith("node-1.")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", event["firstTimestamp"])
    assert room.server.server.calls == ["apply"]


@pytest.mark.parametrize("end", ["b" * 23, ".b" * 11, "-b" * 11, "--b.c"])
def test_the_name_of_an_event_is_one_for_the_api_server(end: str) -> None:
    """It lacks no end of a label where the name of a Node is cut: k8s.io/apimachinery, DNS-1123."""
    for length in range(224, 231):
        node = ("a" * length + end)[:253]
        event = Event(reason="A", message="b", warning=False)
        name = _request(event, _Queued(first="now"), node).name
        assert SUBDOMAIN.fullmatch(name), name
        assert len(name) <= 253


async def test_a_repeated_event_is_counted(room: Room) -> None:
    async with room.running() as one:
        for _ in range(3):
            await room.show(dead(0), card(1))
            await room.show(card(0), card(1))
        await room.show(dead(0, "too hot"), card(1))
        assert room.server.table() == [
            ("NPUUnhealthy", 3),
            ("NPURecovered", 3),
            ("NPUUnhealthy", 1),
        ]
        assert one.results == {"sent": 3, "repeated": 4}


async def test_an_event_repeated_while_it_is_sent_is_counted(room: Room) -> None:
    async with room.running() as one:
        room.server.answers.clear()
        for cards in ((dead(0), card(1)), (card(0), card(1)), (dead(0), card(1))):
            await room.show(*cards)
        assert room.server.table() == []
        room.server.answers.set()
        await until(lambda: room.server.table() == [("NPUUnhealthy", 2), ("NPURecovered", 1)])
        assert one.results == {"sent": 2, "repeated": 1}


async def test_a_repetition_after_a_long_time_is_another_event(room: Room) -> None:
    async with room.running(kept_for=0.2) as one:
        await room.show(dead(0), card(1))
        await room.show(card(0), card(1))
        await asyncio.sleep(0.3)
        await room.show(dead(0), card(1))
        assert sorted(room.server.table()) == [
            ("NPURecovered", 1),
            ("NPUUnhealthy", 1),
            ("NPUUnhealthy", 1),
        ]
        assert one.results == {"sent": 3}


async def test_events_wait_while_the_api_server_is_away(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npu_agent.outputs.events")
    room.server.refuse(ErrorKind.UNREACHABLE)
    async with room.running() as one:
        for _ in range(3):
            await room.show(dead(0), card(1))
            await room.show(card(0), card(1))
        await room.server.reached(5)
        assert one.sending.reason == "it went wrong: UNREACHABLE"
        room.server.refuse(None)
        await until(lambda: len(room.server.objects) == 2)
        assert sorted(room.server.table()) == [("NPURecovered", 3), ("NPUUnhealthy", 3)]
        assert one.results["lost"] == 0
        await until(lambda: not one.sending.reason)
    said = [record.message for record in caplog.records]
    assert said == ["cannot send Events; retrying", "Events can be sent again"]


async def test_an_event_that_is_too_old_is_lost_and_counted_and_stays_a_problem(room: Room) -> None:
    room.server.refuse(ErrorKind.TIMEOUT)
    async with room.running(kept_for=0.1) as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.results["lost"])
        await room.seen()
        assert one.sending.reason, "nothing could be sent since"
        room.server.refuse(None)
        await room.second_fails()


async def test_an_event_that_a_webhook_refuses_keeps_no_other_waiting(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npu_agent.outputs.events")
    room.server.refuse(ErrorKind.FORBIDDEN, "npu0 ")
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.sending.reason)
        await room.second_fails()
        await room.server.reached(room.server.calls.value + 3)
        assert one.sending.reason, "the first one is still refused"
        room.server.refuse(None)
        await until(lambda: len(room.server.objects) == 2)
        await until(lambda: not one.sending.reason)
        assert one.results == {"sent": 2}
    said = [record.message for record in caplog.records]
    assert said == ["cannot send Events; retrying", "Events can be sent again"]


async def test_an_event_that_is_refused_for_good_is_lost(room: Room) -> None:
    room.server.refuse(ErrorKind.REFUSED)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.results["lost"])
        assert room.server.calls.value == 1
        room.server.refuse(None)
        await room.second_fails()


async def test_requests_and_waiting_events_are_limited(room: Room) -> None:
    room.snapshots.publish(snapshot(*map(card, range(12))))
    async with room.running(burst=3, every=3600.0, most=8) as one:
        await room.show(*map(dead, range(12)))
        assert len(room.server.objects) == 3
        assert one.results == {"sent": 3, "lost": 4}


async def test_above_the_limit_it_sleeps_until_the_next_request_is_allowed(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
            await asyncio.Event().wait()
        await sleep(0)

    async with room.running(burst=1, every=3600.0):
        monkeypatch.setattr(asyncio, "sleep", recorded)
        await room.show(dead(0), dead(1))
        assert len(room.server.objects) == 1
        (seconds,) = slept
        assert seconds == pytest.approx(3600.0, abs=60.0)


async def test_no_event_is_sent_while_events_are_switched_off(room: Room) -> None:
    room.wanted.publish(False)
    async with room.running():
        await room.show(dead(0), card(1))
        room.wanted.publish(True)
        await room.second_fails()


async def test_a_long_message_is_cut(room: Room) -> None:
    async with room.running():
        room.configs.publish(config("x" * 5000))
        await room.seen()
        (event,) = room.server.objects.values()
        assert len(event["message"]) == 1024
        assert event["message"].endswith("...")


async def test_a_card_that_leaves_still_names_its_pod_and_the_log_does_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = Room()
    async with room.running():
        room.usages.publish((used(1, "train-0"),))
        room.configs.publish(config("bad"))
        await room.server.reached(1)  # so the Events have seen the Pod
        room.usages.publish(())  # its card is not there any more
        room.snapshots.publish(snapshot(card(0)))
        await room.server.reached(2)
    _, event = room.server.objects.values()
    assert "is gone; in use by ml/train-0: " in event["message"]
    (record,) = [one for one in caplog.records if one.message == "Pods use a card that fails"]
    assert "ml/train-0" in str(record.__dict__)
