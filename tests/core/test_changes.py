"""What is taken for news, as entries; what they read like is for tests/wording."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from npu_agent.core import changes
from npu_agent.core.cordon import Cordons
from npu_agent.core.hardware import CardState, Cause, CoreRange, HealthState, Snapshot
from npu_agent.core.kinds import NamedCard
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.core.state import ConfigState, LabelState, SessionPhase, SessionStatus
from npu_agent.core.timeline import EntryKind, TimelineEntry
from npu_agent.core.trends import Trend, TrendKind, Trends
from tests.outputs.deviceplugin.helpers import state


def seen(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


def reported(entries: Iterable[TimelineEntry]) -> list[tuple[EntryKind, str]]:
    """Kind and card of each entry."""
    return [(entry.kind, entry.card.name if entry.card else "") for entry in entries]


def dead(card: CardState) -> CardState:
    health = replace(
        card.health, state=HealthState.UNHEALTHY, reason="alive says 0", cause=Cause.DEAD
    )
    return replace(card, health=health)


ONE, TWO = state(uuid="A"), state(index=1, uuid="B")
UNHEALTHY = ("NPUUnhealthy", "npu0")


def of_cards(before: Snapshot, after: Snapshot) -> list[tuple[EntryKind, str]]:
    return reported(changes.card_entries(changes.card_changes(before, after)))


MOVED = replace(TWO, card=replace(TWO.card, index=4))


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        (seen(ONE), seen(dead(ONE)), [UNHEALTHY]),
        (seen(dead(ONE)), seen(ONE), [("NPURecovered", "npu0")]),
        (seen(ONE), seen(ONE, TWO), [("NPUAdded", "npu1")]),
        (seen(TWO), seen(dead(ONE), TWO), [("NPUAdded", "npu0"), UNHEALTHY]),
        (seen(ONE, TWO), seen(ONE), [("NPURemoved", "npu1")]),
        (seen(TWO), seen(MOVED), [("NPURenumbered", "npu4")]),
        (seen(ONE), seen(ONE), []),
        # At the start, those that are there are no news but the unhealthy ones.
        (Snapshot(), seen(dead(ONE), TWO), [UNHEALTHY]),
        # What is not known yet is none either.
        (seen(ONE), Snapshot(), []),
    ],
)
def test_cards_that_fail_recover_come_and_go(
    before: Snapshot, after: Snapshot, news: list[tuple[EntryKind, str]]
) -> None:
    assert of_cards(before, after) == news


def test_a_card_that_is_exchanged_is_neither_gone_nor_added() -> None:
    other = state(uuid="C", id_="C")
    (found,) = changes.card_changes(seen(ONE, TWO), seen(other, TWO))
    assert (found.kind, found.card, found.before) == (changes.ChangeKind.EXCHANGED, other, ONE)
    (entry,) = changes.card_entries([found])
    assert entry.kind == "NPUExchanged"
    assert entry.facts == {"title": "FuriosaAI Warboy", "id": "C", "before_id": "WARBOY-0"}
    assert changes.flaps([found]) == ()


def test_a_trend_is_an_entry_when_it_begins_and_when_it_ends() -> None:
    trend = Trend(card=ONE, detail=("above 90 °C",), since=1.0, last=1.0)
    none, hot = Trends(), Trends({(TrendKind.HOT, ONE.id): trend})
    (began,) = changes.trend_entries(none, hot)
    assert (began.kind, began.facts) == ("NPUHot", {"detail": trend.detail})
    assert reported(changes.trend_entries(hot, hot)) == []
    assert reported(changes.trend_entries(hot, none)) == [("NPUCooled", "npu0")]


def test_of_a_card_that_flaps_single_changes_are_no_news() -> None:
    trend = Trend(card=ONE, detail=(), since=1.0, last=1.0)
    found = [*changes.card_changes(seen(ONE, TWO), seen())]
    assert [*changes.without_flapping(found, Trends())] == found
    flapping = Trends({(TrendKind.FLAPPING, ONE.id): trend})
    assert [one.card for one in changes.without_flapping(found, flapping)] == [TWO]


def test_a_card_that_is_gone_was_not_uncordoned() -> None:
    before = Cordons(cards={"A": "x", "B": "y"}, present={"A": "npu0", "B": "npu1"})
    gone = Cordons(present={"B": "npu1"})
    assert reported(changes.cordon_entries(before, gone)) == [("NPUUncordoned", "npu1")]
    back = replace(before, cards={"A": "z"})
    (entry,) = changes.cordon_entries(gone, back)
    assert (entry.kind, entry.card) == ("NPUCordoned", NamedCard("A", "npu0"))
    assert entry.facts == {"reason": "z"}


def test_a_config_that_is_applied_refused_and_corrected() -> None:
    good = ConfigState(loaded_at=1.0)
    bad = replace(
        good,
        errors=(
            "c.yaml:3:1: unknown key",
            "c.yaml:4:1: another",
        ),
        rejected=1,
    )
    applied = replace(good, generation=2, waiting=("pluginDir",))
    (refused,) = changes.config_entries(good, bad)
    assert refused.kind == "ConfigRejected"
    assert refused.facts == {"error": "c.yaml:3:1: unknown key; c.yaml:4:1: another"}
    assert reported(changes.config_entries(bad, bad)) == []
    assert reported(changes.config_entries(bad, good)) == [("ConfigGoodAgain", "")]
    (in_part,) = changes.config_entries(bad, applied)
    assert in_part.kind == "ConfigAppliedInPart"
    assert in_part.facts == {"keys": "pluginDir"}
    again = replace(good, generation=2)
    assert reported(changes.config_entries(good, again)) == [("ConfigApplied", "")]


def test_a_kubelet_that_restarts() -> None:
    new = SessionStatus(resource="npu", phase=SessionPhase.REGISTERING)
    on = replace(new, phase=SessionPhase.REGISTERED, registrations=1)
    lost = replace(on, phase=SessionPhase.REGISTERING, reason="its stream ended")
    again = replace(on, registrations=2)

    def news(
        before: SessionStatus, after: SessionStatus
    ) -> list[tuple[EntryKind, Mapping[str, object]]]:
        entries = changes.session_entries(before, after, "resource")
        return [(entry.kind, entry.facts) for entry in entries]

    def facts(reason: str = "") -> Mapping[str, object]:
        return {"service": "npu", "reason": reason}

    assert news(new, on) == [("Registered", facts())]
    assert news(on, lost) == [("RegistrationLost", facts("its stream ended"))]
    assert news(lost, replace(lost, reason="kubelet.sock is missing")) == []
    assert news(lost, again) == [("RegisteredAgain", facts())]
    blocked = replace(new, phase=SessionPhase.BLOCKED, reason="mount it")
    assert news(new, blocked) == [("ResourceNotServed", facts("mount it"))]
    (by_dra,) = changes.session_entries(new, blocked, "dra")
    assert (by_dra.kind, by_dra.subject) == ("DRANotServed", "dra")
    assert news(blocked, blocked) == []
    no_room = replace(blocked, reason="no room")
    assert news(blocked, no_room) == [("ResourceNotServed", facts("no room"))]
    standby = replace(new, phase=SessionPhase.STANDBY, reason="another agent")
    assert news(new, standby) == [("Standby", facts("another agent"))]
    assert news(on, replace(on, phase=SessionPhase.ENDED)) == []


def test_labels() -> None:
    none = LabelState(output="api")
    there = replace(none, in_place=True, applied_at=5.0)
    failed = replace(there, in_place=False, error="403")
    assert reported(changes.label_entries(none, there)) == [("LabelsApplied", "")]
    assert reported(changes.label_entries(there, there)) == []
    (entry,) = changes.label_entries(there, failed)
    assert (entry.kind, entry.facts) == ("LabelsFailed", {"error": "403"})
    assert reported(changes.label_entries(failed, failed)) == []


def holds(card: CardState, pod: str, core: int) -> Usage:
    who = Assignment("ml", pod, "main", "npu", card.id)
    return Usage(card.id, CoreRange(core, core), who)


def test_pods_that_are_given_a_card_and_release_one() -> None:
    both = seen(ONE, TWO)
    train, other = holds(ONE, "train", 0), holds(TWO, "other", 0)
    released, given = changes.usage_entries([train], [other], both, both)
    assert (released.kind, released.facts) == ("NPUReleased", {"pod": "ml/train"})
    assert (given.kind, given.facts) == ("NPUGiven", {"pod": "ml/other"})
    assert reported([released, given])[1] == ("NPUGiven", "npu1")
    more = holds(ONE, "train", 1)
    assert reported(changes.usage_entries([train], [train, more], both, both)) == []


def test_a_holding_that_changes_with_its_card_is_no_news() -> None:
    train = holds(ONE, "train", 0)
    assert reported(changes.usage_entries([train], [], seen(ONE), seen())) == []
    assert reported(changes.usage_entries([], [train], seen(), seen(ONE))) == []


def test_the_same_reason_at_another_time_is_the_same_entry() -> None:
    later = replace(ONE, health=replace(ONE.health, since=99.0))
    facts = [
        entry.facts
        for card in (ONE, later)
        for entry in changes.card_entries(changes.card_changes(seen(card), seen(dead(card))))
    ]
    assert facts[0] == facts[1]
