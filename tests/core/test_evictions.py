"""Which Pods are to end because their card has failed, and when none is."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.evictions import Decision, disturbance, judge, unseen_cards
from npu_agent.core.hardware import CardState, Cause, HealthState
from npu_agent.core.kinds import NamedCard
from npu_agent.core.ledger import Allocation, Ledger
from npu_agent.core.plan import Facts
from npu_agent.core.state import AgentState, SlicesState
from npu_agent.core.timeline import Timeline
from npu_agent.core.trends import TrendKind
from npu_agent.kubelet.podresources import Holdings
from tests.outputs.deviceplugin.helpers import state as card
from tests.outputs.helpers import claim
from tests.outputs.web.helpers import Scene, driver, fenced, held, stopped

AFTER = 30.0


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch)


def dead(index: int, ago: float = 31.0) -> CardState:
    return fenced(card(index=index), "alive says 0", ago, Cause.DEAD)


def scene(*cards: CardState, **more: Any) -> Scene:
    """Each card is held by a Pod of its number: ``default/pod-0``."""
    uses = tuple(held(each, f"pod-{each.card.index}") for each in cards)
    return Scene(cards=cards, holdings=Holdings(asked_at=1.0, assignments=uses), **more)


def facts_of(state: AgentState, **more: Any) -> Facts:
    """The kubelet has each device for the Pod with the UID ``uid-default/pod-0``."""
    allocations = {
        use.name: Allocation(
            footprints=(), since=0.0, containers=(use,), pod_uids=frozenset({f"uid-{use.pod_name}"})
        )
        for use in state.assignments
    }
    prepared = {claim.uid: claim for driver in state.dra for claim in driver.claims}
    ledger = replace(Ledger(allocations=allocations, prepared=prepared), **more)
    return Facts(snapshot=state.snapshot, ledger=ledger)


def judged(found: Scene, unseen_for: float = 0.0, **more: Any) -> Decision:
    state = replace(found.state(), **more)
    unseen = dict.fromkeys(unseen_cards(state), time.monotonic() - unseen_for)
    return judge(state, facts_of(state), AFTER, unseen)


def doomed(found: Scene, **more: Any) -> list[str]:
    decision = judged(found, **more)
    assert decision.withheld is None
    return [each.name for each in decision.pods]


def withheld(found: Scene, **more: Any) -> str:
    decision = judged(found, **more)
    assert decision.withheld
    assert not decision.cards
    return decision.withheld.kind


HEALTHY = card(index=0), card(index=2), card(index=3)


def test_the_pod_of_a_dead_card_is_doomed_and_no_other_one() -> None:
    found = scene(*HEALTHY, dead(1))
    (pod,) = judged(found).pods
    assert pod.name == "default/pod-1"
    assert pod.uids == {"uid-default/pod-1"}
    assert pod.failed.card == NamedCard(dead(1).id, "npu1")
    assert not pod.by_taint
    assert judged(found).cards == {dead(1).id}


def test_a_card_has_to_be_unhealthy_for_long_enough() -> None:
    found = scene(*HEALTHY, dead(1, ago=29.0))
    decision = judged(found)
    assert (decision.pods, decision.cards) == ((), frozenset())
    assert decision.next_at == pytest.approx(time.monotonic() + 1.0)


@pytest.mark.parametrize(
    "work",
    [
        {"cordons": {dead(1).id: "swap fan"}},
        {"disabled": frozenset({"npu1"})},
    ],
)
def test_a_card_that_a_person_works_on_dooms_no_pod(work: dict[str, Any]) -> None:
    assert doomed(scene(*HEALTHY, dead(1)), **work) == []


def test_degraded_unknown_and_doubtful_cards_doom_no_pod() -> None:
    unknown = card(index=1, health=HealthState.UNKNOWN)
    assert doomed(scene(*HEALTHY, unknown)) == []
    assert doomed(scene(*HEALTHY).lasts(TrendKind.HOT, HEALTHY[0], 99.0)) == []
    assert doomed(scene(*HEALTHY, dead(1)).lasts(TrendKind.TWINS, dead(1), 99.0)) == []


def test_a_gone_card_dooms_its_pod_unless_it_was_cordoned() -> None:
    left = card(index=1)
    now = time.monotonic()
    found = scene(*HEALTHY, left)
    found = replace(found, cards=HEALTHY, timeline=Timeline().left([left], HEALTHY, now - 31.0))
    (pod,) = judged(found).pods
    assert pod.name == "default/pod-1"
    assert pod.uids == {"uid-default/pod-1"}
    assert judged(found).cards == frozenset(), "it is in no slice that could have a taint"
    assert doomed(found, cordons_lost={"npu1": "swap fan"}) == []
    just = replace(found, timeline=Timeline().left([left], HEALTHY, now - 29.0))
    assert doomed(just) == []


def test_a_card_that_only_the_agent_before_saw_counts_from_when_that_is_noticed() -> None:
    found = replace(scene(*HEALTHY, card(index=1)), cards=HEALTHY)
    assert doomed(found, unseen_for=31.0) == ["default/pod-1"]
    assert doomed(found, unseen_for=29.0) == []
    assert doomed(found, unseen_for=31.0, cordons_lost={"npu9": "it may be this one"}) == []


def test_a_card_that_has_just_left_is_not_taken_for_one_that_was_never_seen() -> None:
    """The timeline is written a moment after the hardware has changed."""
    state = replace(scene(*HEALTHY, card(index=1)), cards=HEALTHY).state()
    decision = judge(state, facts_of(state), AFTER)
    assert decision.pods == ()
    assert decision.next_at == pytest.approx(state.monotonic + AFTER)


def test_where_most_cards_fail_together_no_pod_is_doomed() -> None:
    """A driver that goes down takes its cards down one after the other."""
    two_of_three = dead(0, 100.0), dead(1, 60.0), card(index=2)
    assert withheld(scene(*two_of_three)) == "EvictionOfHost"
    apart = dead(0, 200.0), dead(1, 60.0), card(index=2)
    assert doomed(scene(*apart)) == ["default/pod-0", "default/pod-1"]
    assert withheld(scene(dead(0, 500.0), dead(1, 60.0))) == "EvictionOfHost", "no card is left"
    assert doomed(scene(dead(0))) == ["default/pod-0"], "its only card: another node has one"


def test_after_a_fault_of_the_host_a_card_has_its_time_to_come_back() -> None:
    """A driver that comes up brings its cards back one after the other."""
    state = scene(*HEALTHY, dead(1, ago=300.0)).state()
    now = state.monotonic
    decision = judge(state, facts_of(state), AFTER, calm_since=now - 10.0)
    assert decision == Decision(next_at=now + AFTER - 10.0)
    decision = judge(state, facts_of(state), AFTER, calm_since=now - 31.0)
    assert [pod.name for pod in decision.pods] == ["default/pod-1"]
    assert decision.pods[0].failed.since == now - 300.0, "as it is reported"


def test_a_card_that_is_left_and_cordoned_is_none_to_be_given() -> None:
    found = scene(dead(0, 500.0), dead(1, 60.0), card(index=2))
    assert withheld(found, cordons={card(index=2).id: "swap fan"}) == "EvictionOfHost"


def test_no_pod_is_doomed_under_maintenance_or_in_doubt() -> None:
    found = scene(*HEALTHY, dead(1))
    assert withheld(found, maintenance="Drained") == "EvictionInMaintenance"
    assert disturbance(replace(found.state(), maintenance="Drained"))
    assert withheld(found, assignments_error="no socket") == "EvictionInDoubt"
    state = found.state()
    facts = replace(facts_of(state), recovering={"npu.furiosa.ai"})
    decision = judge(state, facts, AFTER)
    assert decision.withheld
    assert decision.withheld.kind == "EvictionInDoubt"
    unreadable = Allocation(footprints=(), since=0.0)
    decision = judge(state, facts_of(state, unreadable=unreadable), AFTER)
    assert decision.withheld
    assert judged(replace(found, complete=False)) == Decision()


def test_a_taint_reaches_who_names_a_claim() -> None:
    prepared = replace(claim("train", dead(1)), pod_uids=("uid-train",))
    found = Scene(cards=(*HEALTHY, dead(1)), dra=(driver(prepared),))
    (pod,) = judged(found).pods
    assert pod.name == "ml/train-pod"
    assert pod.uids == {"uid-train"}
    assert pod.claims == {"train"}
    assert pod.by_taint
    untainted = SlicesState(published=True, dropped=("devices.taints",))
    (pod,) = judged(replace(found, dra=(driver(prepared, slices=untainted),))).pods
    assert not pod.by_taint, "the API server drops taints"
    gone = Timeline().left([card(index=1)], HEALTHY, time.monotonic() - 31.0)
    (pod,) = judged(replace(found, cards=HEALTHY, timeline=gone)).pods
    assert not pod.by_taint, "its device is in no slice"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["healthy", "dead", "gone", "unknown"]),
            st.floats(0, 200),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_pod_of_a_healthy_card_is_ever_doomed(
    drawn: list[tuple[str, float, bool]],
) -> None:
    cards = []
    for index, (what, ago, _) in enumerate(drawn):
        healths = {
            "dead": dead(index, ago),
            "unknown": card(index=index, health=HealthState.UNKNOWN),
        }
        cards.append(healths.get(what, card(index=index)))
    everything = scene(*cards)
    left = [each for each, (what, _, _) in zip(cards, drawn, strict=True) if what == "gone"]
    here = tuple(each for each in cards if each not in left)
    timeline = Timeline()
    for each in left:
        ago = drawn[each.card.index][1]
        timeline = timeline.left([each], here, time.monotonic() - ago)
    cordons = {each.id: "work" for each in here if drawn[each.card.index][2]}
    decision = judged(replace(everything, cards=here, timeline=timeline), cordons=cordons)
    if decision.withheld:
        assert not decision.cards
        return
    for pod in decision.pods:
        what, ago, cordoned = drawn[int(pod.name.rpartition("-")[2])]
        assert what in ("dead", "gone")
        assert ago >= AFTER - 1
        assert what == "gone" or not cordoned
