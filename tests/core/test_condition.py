"""The Node condition as a function of the agent's state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from npu_agent.core.condition import NodeCondition, condition, maintenance, usable
from npu_agent.core.hardware import CardState, Cause
from npu_agent.core.state import SessionPhase, SlicesState
from npu_agent.core.timeline import Timeline
from npu_agent.kubelet.podresources import Holdings
from npu_agent.people.cards import at_one_moment
from tests.outputs.deviceplugin.helpers import state as a_card
from tests.outputs.helpers import DRIVER, RESOURCE
from tests.outputs.web.helpers import Scene, driver, fenced, held

DEAD = "the driver reports the card dead (alive says 0)"


def card(index: int = 0) -> CardState:
    return a_card(index=index)


def healthy(count: int) -> list[CardState]:
    return [card(index) for index in range(count)]


def dead(index: int) -> CardState:
    return fenced(card(index), "alive says 0", 9, Cause.DEAD)


def judged(scene: Scene, expected: int | None = None, seen: int = 2, **more: Any) -> NodeCondition:
    """The condition by this state of the agent, of which `more` is no part of a scene."""
    found = condition(replace(scene.state(), expected_cards=expected, **more), seen)
    assert found
    return found


def said(
    scene: Scene, expected: int | None = None, seen: int = 2, **more: Any
) -> tuple[bool, str, str]:
    found = judged(scene, expected, seen, **more)
    return found.status, found.reason, found.message


def test_nothing_is_said_before_the_cards_are_known() -> None:
    assert condition(Scene(cards=(card(),), complete=False).state(), 1) is None


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


def test_one_cause_of_many_cards_is_said_once() -> None:
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
        "2 of 2 cards are healthy; npu1 has a narrow PCIe link: 8 of 16 lanes",
    )


@pytest.mark.parametrize(
    ("conditions", "unschedulable", "found"),
    [
        ({}, False, ""),
        ({"Ready": "True", "Drained": "False"}, False, ""),
        ({"DrainInProgress": "True"}, False, "DrainInProgress"),
        ({"MaintenancePlanned": "True"}, True, "MaintenancePlanned, the Node is cordoned"),
    ],
)
def test_work_on_the_node_is_named(
    conditions: dict[str, str], unschedulable: bool, found: str
) -> None:
    assert maintenance(conditions, unschedulable=unschedulable) == found
    now = judged(Scene(cards=(card(), dead(1))), maintenance=found)
    assert now.status is False
    assert (f"; the Node is under maintenance: {found}" in now.message) is bool(found)


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
            f"DRA driver {DRIVER}: blocked: why",
        ),
        (
            Scene(dra=(driver(slices=SlicesState()),)),
            "DRANotServed",
            f"DRA driver {DRIVER}: its cards are not published yet",
        ),
    ],
)
def test_what_is_not_served_may_pass(scene: Scene, reason: str, message: str) -> None:
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
    scene.config = replace(scene.config, error="line 3")
    assert judged(scene).status
