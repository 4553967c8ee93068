"""Which Events there are, and how they reach an API server that is slow, away or full."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from npu_agent import backoff
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from npu_agent.feed import Feed
from npu_agent.kube import ApiError, Kind
from npu_agent.kube.client import Request
from npu_agent.outputs import events
from npu_agent.outputs.events import Event, Events, card_events, config_events, driver_events
from npu_agent.simulator.apiserver import NODES, StandInApiServer
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.helpers import DirectApi
from tests.until import first, until


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
    return ConfigState(loaded_at=0.0, error=error)


def shown(before: Snapshot, after: Snapshot) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in card_events(before, after)]


# Which there are.


def test_the_first_look_adds_no_card() -> None:
    assert shown(Snapshot(), Snapshot()) == []
    assert shown(Snapshot(), snapshot(card(0), card(1, HealthState.UNKNOWN))) == []
    assert shown(Snapshot(), snapshot(card(0), dead(1))) == [
        ("NPUUnhealthy", "npu1 (UUID-1, 0000:01:00.0) is unhealthy: alive says 0")
    ]


def test_a_card_dies_and_comes_back() -> None:
    well, sick = snapshot(card(0)), snapshot(dead(0))
    (died,) = card_events(well, sick)
    assert died == Event(
        reason="NPUUnhealthy",
        message="npu0 (UUID-0, 0000:00:00.0) is unhealthy: alive says 0",
        warning=True,
    )
    (back,) = card_events(sick, well)
    assert back == Event(
        reason="NPURecovered",
        message="npu0 (UUID-0, 0000:00:00.0) can be used again: works",
        warning=False,
    )
    assert shown(sick, snapshot(dead(0, "another reason"))) == []
    assert shown(sick, snapshot(card(0, HealthState.UNKNOWN, "the driver does not say")))[0][0] == (
        "NPURecovered"
    )


def test_cards_come_and_go() -> None:
    both, one = snapshot(card(0), card(1)), snapshot(card(0))
    assert shown(both, one) == [("NPURemoved", "npu1 (UUID-1, 0000:01:00.0) is gone")]
    assert shown(one, both) == [
        ("NPUAdded", "npu1 (UUID-1, 0000:01:00.0) is there: FuriosaAI Warboy")
    ]
    assert [reason for reason, _ in shown(one, snapshot(card(0), dead(1)))] == [
        "NPUAdded",
        "NPUUnhealthy",
    ]
    # Renumbered: the same card.
    moved = replace(card(1), card=replace(card(1).card, index=4))
    assert shown(both, snapshot(card(0), moved)) == []


def test_a_card_without_any_identity_is_named_once() -> None:
    bare = replace(card(0), id="npu0", card=replace(card(0).card, pci_bus_id=None))
    assert shown(snapshot(), snapshot(bare)) == [("NPUAdded", "npu0 is there: FuriosaAI Warboy")]


def test_a_refused_config_is_told_and_a_good_one_is_not() -> None:
    (refused,) = config_events(config(), config("config.yaml:3: interval: must be a number"))
    assert refused.reason == "ConfigRejected"
    assert refused.message.endswith("config.yaml:3: interval: must be a number")
    assert not list(config_events(config("x"), config("x")))
    assert not list(config_events(config("x"), config()))


def driver(phase: SessionPhase = SessionPhase.REGISTERED, reason: str = "") -> SessionStatus:
    return SessionStatus(resource="npu.furiosa.ai", phase=phase, reason=reason)


def test_a_driver_that_is_not_served_is_told_with_each_new_reason() -> None:
    good = driver(SessionPhase.REGISTERED)
    refused = driver(SessionPhase.BLOCKED, "the kubelet refuses: no")
    (event,) = driver_events(good, refused)
    assert event == Event(
        reason="DRANotServed",
        message="the DRA driver npu.furiosa.ai does not serve: the kubelet refuses: no",
        warning=True,
    )
    assert list(driver_events(refused, driver(SessionPhase.BLOCKED, "another")))
    assert not list(driver_events(refused, refused))
    assert not list(driver_events(refused, good))
    assert not list(driver_events(good, driver(SessionPhase.STANDBY, "served by another")))
    # At each start, until the API server has answered: it is taken back by nothing.
    assert not list(driver_events(good, driver(SessionPhase.WAITING, "it is not known yet")))


# How they get there.


class Server(DirectApi):
    """Has one Node, and keeps Events."""

    def __init__(self) -> None:
        super().__init__(StandInApiServer("node-1", uid="node-uid"))
        self.objects = self.server.objects["/api/v1/namespaces/default/events"]

    def refuse(self, kind: Kind | None) -> None:
        """Refuses everything so from now on."""
        self.refused = lambda _: error(kind) if kind else None

    async def reached(self, number: int) -> None:
        await first(self.calls, lambda calls: calls >= number)

    def table(self) -> list[tuple[str, int]]:
        return [(each["reason"], each["count"]) for each in self.objects.values()]


def error(kind: Kind) -> ApiError:
    return ApiError(f"it went wrong: {kind.name}", kind=kind)


@dataclass
class Room:
    server: Server = field(default_factory=Server)
    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(snapshot(card(0), card(1))))
    configs: Feed[ConfigState] = field(default_factory=lambda: Feed(config()))
    wanted: Feed[bool] = field(default_factory=lambda: Feed(True))
    driver: Feed[SessionStatus] = field(default_factory=lambda: Feed(driver()))

    @asynccontextmanager
    async def running(self, node_name: str | None = "node-1") -> AsyncIterator[Events]:
        one = Events(
            api=self.server,
            node_name=node_name,
            snapshots=self.snapshots,
            configs=self.configs,
            wanted=self.wanted,
            drivers=[self.driver],
        )
        task = asyncio.create_task(one.run())
        await self.seen()
        try:
            yield one
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def show(self, *cards: CardState) -> None:
        """The hardware changes, and the change is seen."""
        self.snapshots.publish(snapshot(*cards))
        await self.seen()

    async def seen(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(backoff.ApiBackoff, "next", lambda *_: 0.01)
    return Room()


async def test_a_driver_that_fails_the_same_way_again_and_again_is_one_event(room: Room) -> None:
    async with room.running():
        for _ in range(3):
            room.driver.publish(driver(SessionPhase.BLOCKED, "no directory"))
            await room.seen()
            room.driver.publish(driver(SessionPhase.REGISTERING))
            await room.seen()
        await first(room.server.calls, lambda calls: calls >= 2)
        room.driver.publish(driver())
        await room.seen()
        room.driver.publish(driver(SessionPhase.BLOCKED, "no directory"))
        await until(lambda: room.server.table() == [("DRANotServed", 2)])


async def test_an_event_is_about_the_node_and_says_who_sent_it(room: Room) -> None:
    async with room.running():
        await room.show(dead(0), card(1))
        (event,) = room.server.objects.values()
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "node-1",
        "uid": "node-uid",
    }
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "NPUUnhealthy", 1)
    assert event["source"] == {"component": "npu-agent", "host": "node-1"}
    assert event["metadata"]["name"].startswith("node-1.")
    assert event["firstTimestamp"] == event["lastTimestamp"]


async def test_what_repeats_is_counted(room: Room) -> None:
    async with room.running() as one:
        for _ in range(3):
            await room.show(dead(0), card(1))
            await room.show(card(0), card(1))
        assert room.server.table() == [("NPUUnhealthy", 3), ("NPURecovered", 3)]
        assert one.results == {"sent": 2, "repeated": 4}


async def test_another_reason_is_another_event(room: Room) -> None:
    async with room.running():
        await room.show(dead(0), card(1))
        await room.show(card(0), card(1))
        await room.show(dead(0, "too hot"), card(1))
    assert [reason for reason, _ in room.server.table()].count("NPUUnhealthy") == 2


async def test_what_repeats_while_it_is_sent_is_counted(room: Room) -> None:
    async with room.running() as one:
        room.server.answers.clear()
        for cards in ((dead(0), card(1)), (card(0), card(1)), (dead(0), card(1))):
            await room.show(*cards)
        assert room.server.table() == []
        room.server.answers.set()
        await room.seen()
        assert room.server.table() == [("NPUUnhealthy", 2), ("NPURecovered", 1)]
        assert one.results == {"sent": 2, "repeated": 1}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock, and the one that never jumps, in seconds."""
    now = [1_000_000.0, 0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(events, "_now", lambda: now[1])
    return now


async def test_what_repeats_after_a_long_time_is_another_event(
    room: Room, clock: list[float]
) -> None:
    async with room.running() as one:
        await room.show(dead(0), card(1))
        clock[1] += 599.0
        await room.show(card(0), card(1))
        await room.show(dead(0), card(1))
        clock[1] += 601.0
        await room.show(card(0), card(1))
        await room.show(dead(0), card(1))
        assert room.server.table() == [
            ("NPUUnhealthy", 2),
            ("NPURecovered", 1),
            ("NPURecovered", 1),
            ("NPUUnhealthy", 1),
        ]
        assert one.results == {"sent": 4, "repeated": 1}


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
async def test_a_wall_clock_that_jumps_neither_loses_nor_repeats_anything(
    room: Room, clock: list[float], jump: float
) -> None:
    room.server.refuse(Kind.UNREACHABLE)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        clock[0] += jump
        await room.show(card(0), card(1))
        await room.show(dead(0), card(1))
        room.server.refuse(None)
        await until(lambda: len(room.server.objects) == 2)
        assert sorted(room.server.table()) == [("NPURecovered", 1), ("NPUUnhealthy", 2)]
        day = 12 + round(jump / 86_400)
        for event in room.server.objects.values():  # by the clock as it is when they are sent
            assert event["firstTimestamp"] == f"1970-01-{day}T13:46:40Z"
            assert event["lastTimestamp"] == event["firstTimestamp"]
        clock[1] += 601.0  # by the clock that counts, that is long ago
        await room.show(card(0), card(1))
        assert room.server.table()[-1] == ("NPURecovered", 1)
        assert one.results == {"sent": 3}


async def test_what_repeats_after_the_node_was_made_anew_is_about_the_new_one(room: Room) -> None:
    async with room.running() as one:
        await room.show(dead(0), card(1))
        room.server.server.objects[NODES]["node-1"]["metadata"]["uid"] = "new-uid"
        await room.show(card(0), card(1))
        for _ in range(2):
            await room.show(dead(0), card(1))
            await room.show(card(0), card(1))
        assert one.results == {"sent": 3, "repeated": 3}
    about = [(e["reason"], e["involvedObject"]["uid"]) for e in room.server.objects.values()]
    assert about == [
        ("NPUUnhealthy", "node-uid"),
        ("NPURecovered", "new-uid"),
        ("NPUUnhealthy", "new-uid"),
    ]


async def test_an_event_that_was_deleted_is_created_again(room: Room, clock: list[float]) -> None:
    async with room.running():
        await room.show(dead(0), card(1))
        room.server.objects.clear()
        clock[0] += 100.0
        clock[1] += 100.0
        for _ in range(2):
            await room.show(card(0), card(1))
            await room.show(dead(0), card(1))
    assert sorted(room.server.table()) == [("NPURecovered", 2), ("NPUUnhealthy", 2)]
    for event in room.server.objects.values():
        assert event["firstTimestamp"] == "1970-01-12T13:48:20Z"


async def test_what_happens_while_the_server_is_away_is_told_when_it_is_back(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npu_agent.outputs.events")
    room.server.refuse(Kind.UNREACHABLE)
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
        await room.seen()
        assert not one.sending.reason
    said = [record.message for record in caplog.records]
    assert said == ["events cannot be sent: trying again", "events can be sent again"]


async def test_what_is_too_old_is_lost_and_counted(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.server.refuse(Kind.TIMEOUT)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await room.server.reached(2)
        monkeypatch.setattr(events, "_KEPT_FOR", -1.0)
        await until(lambda: one.results["lost"])
        room.server.refuse(None)
        monkeypatch.setattr(events, "_KEPT_FOR", 600.0)
        await room.show(dead(0), dead(1))
        await until(lambda: room.server.objects)
        (event,) = room.server.objects.values()
        assert "npu1" in event["message"]


async def test_what_becomes_too_old_while_it_is_sent_is_not_lost(
    room: Room, clock: list[float]
) -> None:
    room.server.answers.clear()
    async with room.running() as one:
        await room.show(dead(0), card(1))
        assert room.server.calls.value == 1
        clock[1] += 601.0
        await room.show(dead(0), dead(1))
        room.server.answers.set()
        await until(lambda: len(room.server.objects) == 2)
        await room.seen()
        assert one.results == {"sent": 2}


@pytest.mark.parametrize("kind", [Kind.NOT_FOUND, Kind.CONFLICT])
async def test_a_node_that_is_away_or_a_name_that_is_taken_loses_no_event(
    room: Room, kind: Kind
) -> None:
    room.server.refuse(kind)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await room.server.reached(3)
        room.server.refuse(None)
        await until(lambda: room.server.table() == [("NPUUnhealthy", 1)])
        assert one.results == {"sent": 1}


async def test_an_event_that_is_refused_for_good_holds_up_no_other(room: Room) -> None:
    room.server.refuse(Kind.REFUSED)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.results["lost"])
        room.server.refuse(None)
        await room.show(dead(0), dead(1))
        await until(lambda: room.server.objects)
        (event,) = room.server.objects.values()
        assert "npu1" in event["message"]


def about(card: str, kind: Kind) -> Callable[[Request], ApiError | None]:
    """A webhook that refuses what is about a card."""
    return lambda request: error(kind) if f"{card} " in str(request.body) else None


@pytest.mark.parametrize("kind", [Kind.FORBIDDEN, Kind.CONFLICT, Kind.GARBAGE])
async def test_an_event_that_a_webhook_refuses_holds_up_no_other(
    room: Room, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npu_agent.outputs.events")
    room.server.refused = about("npu0", kind)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.sending.reason)
        await room.show(dead(0), dead(1))
        await until(lambda: room.server.objects)
        (event,) = room.server.objects.values()
        assert "npu1" in event["message"]
        await room.server.reached(room.server.calls.value + 6)
        assert one.sending.reason, "the first one is still refused"
        await room.show(dead(0), card(1))
        await until(lambda: len(room.server.objects) == 2)
        room.server.refused = lambda _: None
        await until(lambda: len(room.server.objects) == 3)
        await until(lambda: not one.sending.reason)
        assert one.results == {"sent": 3}
    said = [record.message for record in caplog.records]
    assert said == ["events cannot be sent: trying again", "events can be sent again"]


async def test_new_events_go_before_all_that_are_refused(room: Room) -> None:
    room.snapshots.publish(snapshot(*map(card, range(6))))
    tried: list[str] = []

    def refused(request: Request) -> ApiError | None:
        if request.method == "POST":
            assert request.body
            tried.append(request.body["message"][:4])
            return None if "npu5 " in request.body["message"] else error(Kind.FORBIDDEN)
        return None

    room.server.refused = refused
    async with room.running():
        await room.show(*map(dead, range(5)), card(5))
        await until(lambda: len(tried) >= 12)
        assert tried[:10] == ["npu0", "npu1", "npu2", "npu3", "npu4"] * 2
        before = len(tried)
        await room.show(*map(dead, range(6)))
        await until(lambda: "npu5" in tried)
        assert tried.index("npu5") <= before + 1, "the one that was under way may come first"


async def test_an_event_that_is_refused_until_it_is_too_old_is_no_trouble_any_more(
    room: Room, clock: list[float]
) -> None:
    room.server.refused = about("npu0", Kind.FORBIDDEN)
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await until(lambda: one.sending.reason)
        await room.show(dead(0), dead(1))
        await until(lambda: room.server.objects)
        assert one.sending.reason
        clock[1] += 601.0
        await until(lambda: not one.sending.reason)
        assert one.results == {"sent": 1, "lost": 1}


async def test_events_that_are_all_refused_stay_a_trouble_when_they_are_lost(
    room: Room, clock: list[float]
) -> None:
    async with room.running() as one:
        await room.show(card(0), dead(1))
        await until(lambda: one.results["sent"])
        room.server.refuse(Kind.FORBIDDEN)
        await room.show(dead(0), dead(1))
        await until(lambda: one.sending.reason)
        clock[1] += 601.0
        await until(lambda: one.results["lost"])
        await room.seen()
        assert one.sending.reason, "nothing could be sent since"


async def test_repeats_without_the_right_to_patch_hold_up_no_other(room: Room) -> None:
    def refused(request: Request) -> ApiError | None:
        return error(Kind.FORBIDDEN) if request.method == "PATCH" else None

    room.server.refused = refused
    async with room.running() as one:
        await room.show(dead(0), card(1))
        await room.show(card(0), card(1))
        await room.show(dead(0), card(1))
        await until(lambda: one.sending.reason)
        await room.show(dead(0), dead(1))
        await until(lambda: any("npu1" in each["message"] for each in room.server.objects.values()))


async def test_there_is_a_limit_to_requests_and_to_what_waits(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_BURST", 3)
    monkeypatch.setattr(events, "_EVERY", 3600.0)
    monkeypatch.setattr(events, "_MOST", 5)
    many = [card(index) for index in range(12)]
    room.snapshots.publish(snapshot(*many))
    async with room.running() as one:
        await room.show(*(dead(index) for index in range(12)))
        assert len(room.server.objects) == 3
        assert one.results == {"sent": 3, "lost": 7}


async def test_nothing_is_sent_where_nobody_wants_it(room: Room) -> None:
    room.wanted.publish(False)
    async with room.running():
        await room.show(dead(0), card(1))
        room.wanted.publish(True)
        await room.show(dead(0), dead(1))
        (event,) = room.server.objects.values()
        assert "npu1" in event["message"]


async def test_without_a_node_name_it_waits_quietly(room: Room) -> None:
    async with room.running(node_name=None):
        await room.show(dead(0), card(1))
        assert room.server.calls.value == 0


async def test_a_long_message_is_cut(room: Room) -> None:
    async with room.running():
        room.configs.publish(config("x" * 5000))
        await room.seen()
        (event,) = room.server.objects.values()
        assert len(event["message"]) == 1024
        assert event["message"].endswith("...")
