"""What the Node condition is by the agent's state, when it is written, and since when it is so."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_agent.core.hardware import CardState, Cause
from npu_agent.core.state import SessionPhase, SlicesState
from npu_agent.core.timeline import Timeline
from npu_agent.feed import Feed
from npu_agent.kube import ApiError, ErrorKind
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs import condition
from npu_agent.outputs.condition import (
    ConditionTiming,
    ConditionWriter,
    NodeCondition,
    Observed,
    usable,
)
from npu_agent.people.cards import at_one_moment
from npu_agent.people.simulator.apiserver import NODES
from npu_agent.supervise import background
from tests.kube.apiserver import FaultyApiServer
from tests.outputs.deviceplugin.helpers import state as a_card
from tests.outputs.helpers import DRIVER, RESOURCE, DirectApi
from tests.outputs.web.helpers import Scene, driver, fenced, held
from tests.until import first, until

TYPE = "furiosa.ai/NPUReady"
QUICK = ConditionTiming(settle=0.0, transient=0.3, recovered=0.3, gap=0.0, longest_pause=0.02)
KUBELETS = {"type": "Ready", "status": "True"}


def card(index: int = 0) -> CardState:
    return a_card(index=index)


def dead(index: int) -> CardState:
    return fenced(card(index), "alive says 0", 9, Cause.DEAD)


DEAD = "the driver reports the card dead (alive says 0)"


# What it is.


def healthy(count: int) -> list[CardState]:
    return [card(index) for index in range(count)]


def judged(scene: Scene, expected: int | None = None, seen: int = 2, **more: Any) -> NodeCondition:
    """The condition by this state of the agent, of which `more` is no part of a scene."""
    found = condition.condition(replace(scene.state(), expected_cards=expected, **more), seen)
    assert found
    return found


def said(
    scene: Scene, expected: int | None = None, seen: int = 2, **more: Any
) -> tuple[bool, str, str]:
    found = judged(scene, expected, seen, **more)
    return found.status, found.reason, found.message


def test_there_is_no_condition_before_the_cards_are_known() -> None:
    assert condition.condition(Scene(cards=(card(),), complete=False).state(), 1) is None


def test_all_is_well() -> None:
    scene = Scene(cards=(*healthy(2),))
    assert said(scene) == (True, "NPUsReady", "2 of 2 cards are healthy")
    # More than are expected are no fault.
    assert said(scene, expected=1) == (True, "NPUsReady", "2 of 1 cards are healthy")


def test_a_dead_card_is_named_with_its_cause_and_pods() -> None:
    cards = (card(), dead(1))
    held_by = Holdings(asked_at=1.0, assignments=(held(cards[1], "train-0"),))
    assert said(Scene(cards=cards, holdings=held_by)) == (
        False,
        "CardUnhealthy",
        f"1 of 2 cards are healthy; npu1: {DEAD}, held by default/train-0",
    )
    # What is left is enough.
    assert said(Scene(cards=cards), expected=1) == (
        True,
        "NPUsDegraded",
        f"1 of 1 cards are healthy; npu1: {DEAD}",
    )


def test_a_cause_of_many_cards_is_said_once() -> None:
    scene = Scene(cards=tuple(dead(index) for index in range(64)))
    assert judged(scene, seen=64).message == (
        f"0 of 64 cards are healthy; npu0, npu1, npu2, npu3 and 60 more: {DEAD}"
    )
    pods = Holdings(asked_at=1.0, assignments=(held(scene.cards[0], "x" * 2000),))
    assert len(judged(replace(scene, holdings=pods), seen=64).message) == 1000


def test_a_card_that_a_person_has_taken_out_is_nothing_to_repair() -> None:
    scene = Scene(cards=(card(), dead(1)), disabled=frozenset({"npu1"}))
    assert usable(scene.state()) == 2
    assert said(scene) == (True, "NPUsReady", "2 of 2 cards are healthy")


@pytest.mark.parametrize("where", [card, dead])
def test_a_cordoned_card_is_nothing_to_repair_and_is_named(
    where: Callable[[int], CardState],
) -> None:
    scene = Scene(cards=(card(), where(1)))
    assert said(scene, cordons={scene.cards[1].id: "swap fan"}) == (
        True,
        "NPUsReady",
        "2 of 2 cards are healthy; npu1 is cordoned: swap fan",
    )


def test_degraded_is_not_dead() -> None:
    scene = Scene(cards=(card(), replace(card(1), card=replace(card(1).card, lanes=(8, 16)))))
    assert said(scene, trends=at_one_moment(scene.snapshot)) == (
        True,
        "NPUsDegraded",
        "2 of 2 cards are healthy; npu1 has a slow PCIe link: 8 of 16 lanes",
    )


def test_work_on_the_node_is_named() -> None:
    now = judged(Scene(cards=(card(), dead(1))), maintenance="Drained")
    assert now.status is False
    assert now.message.endswith("; the Node is under maintenance: Drained")


@pytest.mark.parametrize("expected", [None, 2])
def test_a_card_that_left_is_missed(expected: int | None) -> None:
    scene = Scene(cards=(card(),), timeline=Timeline().left([card(1)], (), 1.0))
    assert said(scene, expected) == (
        False,
        "CardMissing",
        "1 of 2 cards are healthy; npu1: gone from the host",
    )
    assert said(scene, expected=1) == (True, "NPUsReady", "1 of 1 cards are healthy")


def test_more_are_expected_than_there_ever_were() -> None:
    status, reason, message = said(Scene(cards=(*healthy(2),)), expected=16)
    assert (status, reason) == (False, "TooFewCards")
    assert message.startswith("2 of 16 cards are healthy; the host has shown 2 since it booted: ")
    assert "health.expectedCards" in message


def test_a_node_without_cards() -> None:
    found = judged(Scene(), seen=0)
    assert (found.status, found.reason) == (False, "NoCards")
    assert said(Scene(), expected=0, seen=0) == (True, "NPUsReady", "0 of 0 cards are healthy")


@pytest.mark.parametrize(
    ("scene", "reason", "message"),
    [
        (
            Scene(phase=SessionPhase.REGISTERING, reason="no socket"),
            "NotRegistered",
            f"new Pods get no {RESOURCE}: registering again: no socket",
        ),
        (
            Scene(dra=(driver(phase=SessionPhase.BLOCKED, reason="why"),)),
            "DRANotServed",
            f"DRA driver {DRIVER} cannot be served: blocked: why",
        ),
        (
            Scene(dra=(driver(slices=SlicesState()),)),
            "DRANotServed",
            f"the cards of DRA driver {DRIVER} are not published yet",
        ),
    ],
)
def test_a_resource_that_is_not_served_is_transient(
    scene: Scene, reason: str, message: str
) -> None:
    scene.cards = (*healthy(2),)
    found = judged(scene)
    assert (found.status, found.reason, found.transient) == (False, reason, True)
    assert found.message == f"2 of 2 cards are healthy; {message}"
    # A dead card is no matter of seconds, whatever else there is.
    scene.cards = (card(), dead(1))
    worse = judged(scene)
    assert (worse.reason, worse.transient) == ("CardUnhealthy", False)
    assert message in worse.message


def test_a_standby_and_a_bad_config_file_take_no_work_away() -> None:
    scene = Scene(cards=(*healthy(2),), phase=SessionPhase.STANDBY)
    scene.config = replace(scene.config, errors=("line 3",))
    assert judged(scene).status


# When it is written.


class Room:
    """A Node with two cards at an API server, and the writer's files."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = DirectApi(FaultyApiServer("n1"))
        self.node["status"]["conditions"] = [KUBELETS]
        self.scene = Scene(cards=(card(), card(1)))
        self.changes: Feed[int] = Feed(0)
        self.type = Feed(TYPE)
        self.directory = directory
        self.now = 1_800_000_000
        monkeypatch.setattr(condition, "BOOT_ID", directory / "boot_id")
        self.boot("first")
        monkeypatch.setattr(condition, "stamp", self._stamp)

    def _stamp(self) -> str:
        """A second later each time."""
        self.now += 1
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now))

    @property
    def node(self) -> dict[str, Any]:
        return self.api.server.objects[NODES]["n1"]

    def boot(self, id_: str) -> None:
        (self.directory / "boot_id").write_text(id_ + "\n", encoding="utf-8")

    @property
    def found(self) -> dict[str, Any]:
        """Ours; empty if there is none."""
        conditions = self.node["status"]["conditions"]
        assert conditions[0] == KUBELETS
        return next((one for one in conditions[1:] if one["type"] == TYPE), {})

    @property
    def writes(self) -> int:
        return self.api.server.calls.count("apply")

    def sees(self, *cards: Any, **more: Any) -> None:
        self.scene = replace(self.scene, cards=cards, **more)
        self.changes.publish(self.changes.value + 1)

    async def says(self, status: str, reason: str) -> dict[str, Any]:
        await until(
            lambda: (self.found.get("status"), self.found.get("reason")) == (status, reason)
        )
        return self.found

    @asynccontextmanager
    async def agent(self, timing: ConditionTiming = QUICK) -> AsyncIterator[ConditionWriter]:
        """An agent from its start to its end."""
        writer = ConditionWriter(
            api=self.api,
            node_name="n1",
            observed=Observed(lambda: self.scene.state(), (self.changes,)),  # noqa: PLW0108 (it is exchanged)
            type_=self.type,
            directory=self.directory,
            timing=timing,
        )
        task = asyncio.create_task(writer.run())
        try:
            yield writer
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(tmp_path, monkeypatch)


async def settled(room: Room, writes: int) -> None:
    """Nothing more is written."""
    await asyncio.sleep(0.1)
    assert room.writes == writes


async def test_faults_and_the_way_back(room: Room) -> None:
    async with room.agent():
        first = await room.says("True", "NPUsReady")
        assert first["lastTransitionTime"] == first["lastHeartbeatTime"]
        room.sees(card(), dead(1))
        failed = await room.says("False", "CardUnhealthy")
        assert failed["lastTransitionTime"] > first["lastTransitionTime"]
        assert "npu1: the driver reports the card dead" in failed["message"]
        room.sees(card(), card(1))
        back = await room.says("True", "NPUsReady")
        assert back["lastTransitionTime"] > failed["lastTransitionTime"]
        room.sees(card(), card(1), phase=SessionPhase.REGISTERING)  # for longer than a start takes
        unserved = await room.says("False", "NotRegistered")
    assert room.found == unserved  # what is there at the end stays
    assert room.writes == 4


async def test_a_second_reason_and_a_new_agent_leave_the_time_alone(room: Room) -> None:
    async with room.agent():
        await room.says("True", "NPUsReady")
        room.sees(card(), dead(1))
        failed = await room.says("False", "CardUnhealthy")
        room.sees(dead(0), dead(1))
        await until(lambda: "npu0, npu1" in room.found["message"])
        assert room.found["lastTransitionTime"] == failed["lastTransitionTime"]
        writes = room.writes
    room.now += 60
    async with room.agent(replace(QUICK, heartbeat=0.02)):
        await until(lambda: room.writes > writes)
        assert room.found["lastTransitionTime"] == failed["lastTransitionTime"]
        assert room.found["lastHeartbeatTime"] > failed["lastHeartbeatTime"]


async def test_a_new_agent_writes_nothing_while_nothing_changes(room: Room) -> None:
    room.now = int(time.time()) - 5
    async with room.agent():
        await room.says("True", "NPUsReady")
    # It has not registered anything yet, and knows no cards at first.
    room.scene = replace(room.scene, phase=SessionPhase.REGISTERING, complete=False)
    async with room.agent():
        await settled(room, 1)
        room.sees(*room.scene.cards, complete=True)
        await settled(room, 1)
        room.sees(*room.scene.cards, phase=SessionPhase.REGISTERED)
        await asyncio.sleep(QUICK.transient)
        await settled(room, 1)


async def test_a_card_that_comes_and_goes_is_a_fault_throughout(room: Room) -> None:
    async with room.agent():
        await room.says("True", "NPUsReady")
        room.sees(card(), dead(1))
        failed = await room.says("False", "CardUnhealthy")
        for at in range(12):
            room.sees(card(), (card if at % 2 else dead)(1))
            await asyncio.sleep(0.05)
        assert room.found["lastTransitionTime"] == failed["lastTransitionTime"]
        assert room.found["status"] == "False"


async def test_a_fault_that_never_lasts_is_one_all_the_same(room: Room) -> None:
    """A card that is away for less than a fault has to last, repeatedly."""

    async def blinks() -> None:
        while True:
            for cards in ((card(),), (card(), card(1))):
                room.sees(*cards)
                await asyncio.sleep(0.05)

    async with room.agent(replace(QUICK, settle=0.3, recovered=0.6)):
        await room.says("True", "NPUsReady")
        async with background(blinks()):
            failed = await room.says("False", "TooFewCards")
            seen = room.changes.value
            await until(lambda: room.changes.value > seen + 20)
            assert room.found == failed
        room.sees(card(), card(1))
        await room.says("True", "NPUsReady")


async def test_the_cards_seen_since_the_boot_are_expected(room: Room) -> None:
    async with room.agent():
        await room.says("True", "NPUsReady")
    room.scene = replace(room.scene, cards=(card(),))
    async with room.agent():
        assert "1 of 2" in (await room.says("False", "TooFewCards"))["message"]
    room.boot("second")
    async with room.agent():
        assert "1 of 1" in (await room.says("True", "NPUsReady"))["message"]
    (room.directory / condition.SEEN).write_text("{", encoding="utf-8")
    async with room.agent():
        await room.says("True", "NPUsReady")


async def test_a_node_that_never_had_cards_gets_no_condition(room: Room) -> None:
    room.scene = replace(room.scene, cards=())
    async with room.agent():
        await settled(room, 0)
        room.sees(expected_cards=0)
        await room.says("True", "NPUsReady")
        # One that had some is not ready without them.
        room.sees(expected_cards=None)
        await room.says("False", "NoCards")


async def test_a_new_type_replaces_the_condition_and_no_type_removes_it(room: Room) -> None:
    async with room.agent() as writer:
        await room.says("True", "NPUsReady")
        room.type.publish("AcceleratedHardwareReady")
        await until(lambda: not room.found)
        types = [one["type"] for one in room.node["status"]["conditions"]]
        assert types == ["Ready", "AcceleratedHardwareReady"]
        room.type.publish("")
        await until(lambda: room.node["status"]["conditions"] == [KUBELETS])
        await until(lambda: writer.state.value is None)
        room.sees(dead(0))
        await settled(room, room.writes)


@pytest.mark.parametrize("boot", ["first", "second"])
async def test_a_condition_of_an_earlier_agent_is_removed_with_its_type(
    room: Room, boot: str
) -> None:
    """The config was changed by the rollout that started this agent, or while none ran."""
    async with room.agent():
        await room.says("True", "NPUsReady")
    room.boot(boot)
    room.type.publish("")
    async with room.agent() as writer:
        await until(lambda: room.node["status"]["conditions"] == [KUBELETS])
        await until(
            lambda: (
                json.loads((room.directory / condition.SEEN).read_text(encoding="utf-8"))["type"]
                == ""
            )
        )
        assert writer.state.value is None
    calls = len(room.api.server.calls)
    async with room.agent():
        await asyncio.sleep(0.1)
    assert len(room.api.server.calls) == calls


async def test_a_condition_that_may_not_be_removed_is_a_problem_until_a_person_did_it(
    room: Room,
) -> None:
    """The config and the component `node-condition` were removed together."""
    async with room.agent():
        await room.says("True", "NPUsReady")
    room.type.publish("")
    refusal = ApiError("403 Forbidden", "do this", kind=ErrorKind.FORBIDDEN)
    room.api.refused = lambda request: refusal if request.verb == "apply" else None
    async with room.agent() as writer:
        state = await first(writer.state, lambda state: state is not None)
        assert state
        assert state.error == (
            f"{TYPE} cannot be removed: 403 Forbidden: remove it: `kubectl patch node n1 "
            "--subresource=status --type=strategic -p '"
            '{"status": {"conditions": [{"type": "furiosa.ai/NPUReady", "$patch": "delete"}]}}\'`'
        )
        room.node["status"]["conditions"] = [KUBELETS]
        await until(lambda: writer.state.value is None)
    assert json.loads((room.directory / condition.SEEN).read_text(encoding="utf-8"))["type"] == ""


async def test_without_a_type_the_api_server_is_not_asked(room: Room) -> None:
    room.type.publish("")
    async with room.agent():
        room.sees(dead(0))
        await asyncio.sleep(0.1)
    assert room.api.server.calls == []
    assert [path.name for path in room.directory.iterdir()] == ["boot_id"]


async def test_a_right_that_is_missing_is_said_once_and_does_no_harm(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = ApiError("cannot apply", "do this", kind=ErrorKind.FORBIDDEN)
    room.api.refused = lambda request: refusal if request.verb == "apply" else None
    async with room.agent() as writer:
        await until(lambda: writer.state.value and writer.state.value.error)
        await until(lambda: room.api.calls.value > 9)
        assert caplog.text.count("the Node's condition cannot be written") == 1
        room.api.refused = lambda _: None
        await room.says("True", "NPUsReady")
        await until(lambda: writer.state.value and not writer.state.value.error)


async def test_a_condition_that_another_agent_has_written_meanwhile(room: Room) -> None:
    async with room.agent():
        await room.says("True", "NPUsReady")
        ours = dict(room.found)
        theirs = {**ours, "status": "False", "lastTransitionTime": "2026-11-25T00:00:00Z"}
        room.node["status"]["conditions"] = [KUBELETS, theirs]
        room.sees(card(), dead(1))
        found = await room.says("False", "CardUnhealthy")
        assert found["lastTransitionTime"] == "2026-11-25T00:00:00Z"
