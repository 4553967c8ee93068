"""What is taken for news, in plain words."""

from dataclasses import replace

import pytest

from npu_agent.core import changes
from npu_agent.core.cordon import Cordons
from npu_agent.core.hardware import CardState, Cause, CoreRange, HealthState, Snapshot
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.core.state import ConfigState, LabelState, SessionPhase, SessionStatus
from npu_agent.core.timeline import TimelineEntry
from npu_agent.core.trends import Trend, TrendKind, Trends
from tests.outputs.deviceplugin.helpers import state


def seen(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


def reported(found: object) -> list[tuple[str, str]]:
    assert isinstance(found, (list, tuple)) or hasattr(found, "__iter__")
    return [(one.tone, one.text) for one in found if isinstance(one, TimelineEntry)]


def dead(card: CardState) -> CardState:
    health = replace(
        card.health, state=HealthState.UNHEALTHY, reason="alive says 0", cause=Cause.DEAD
    )
    return replace(card, health=health)


ONE, TWO = state(uuid="A"), state(index=1, uuid="B")
UNHEALTHY = ("bad", "npu0 became unhealthy: the driver reports the card dead (alive says 0)")


def of_cards(before: Snapshot, after: Snapshot) -> list[tuple[str, str]]:
    return reported(changes.card_entries(changes.card_changes(before, after)))


MOVED = replace(TWO, card=replace(TWO.card, index=4))
ADDED = ("good", "npu1 was added: FuriosaAI Warboy")


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        (seen(ONE), seen(dead(ONE)), [UNHEALTHY]),
        (seen(dead(ONE)), seen(ONE), [("good", "npu0 recovered: works")]),
        (seen(ONE), seen(ONE, TWO), [ADDED]),
        (seen(TWO), seen(dead(ONE), TWO), [(ADDED[0], ADDED[1].replace("1", "0")), UNHEALTHY]),
        (seen(ONE, TWO), seen(ONE), [("bad", "npu1 is gone")]),
        (seen(TWO), seen(MOVED), [("plain", "npu1 is npu4 now")]),
        (seen(ONE), seen(ONE), []),
        # At the start, those that are there are no news but the unhealthy ones.
        (Snapshot(), seen(dead(ONE), TWO), [UNHEALTHY]),
        # What is not known yet is none either.
        (seen(ONE), Snapshot(), []),
    ],
)
def test_cards_that_fail_recover_come_and_go(
    before: Snapshot, after: Snapshot, news: list[tuple[str, str]]
) -> None:
    assert of_cards(before, after) == news


def test_a_card_that_is_exchanged_is_neither_gone_nor_added() -> None:
    other = state(uuid="C", id_="C")
    (found,) = changes.card_changes(seen(ONE, TWO), seen(other, TWO))
    assert (found.kind, found.card, found.before) == (changes.ChangeKind.EXCHANGED, other, ONE)
    assert reported(changes.card_entries([found])) == [
        ("plain", "npu0 is another card now: FuriosaAI Warboy, C, in place of WARBOY-0")
    ]
    assert changes.flaps([found]) == ()


def test_what_lasts_is_news_when_it_begins_and_when_it_ends() -> None:
    trend = Trend(card=ONE, detail="above 90 °C", since=1.0, last=1.0)
    none, hot = Trends(), Trends({(TrendKind.HOT, ONE.id): trend})
    assert reported(changes.trend_entries(none, hot)) == [("warn", "npu0 is hot: above 90 °C")]
    assert reported(changes.trend_entries(hot, hot)) == []
    assert reported(changes.trend_entries(hot, none)) == [("good", "npu0 is no longer hot")]


def test_of_a_card_that_flaps_single_changes_are_no_news() -> None:
    trend = Trend(card=ONE, detail="", since=1.0, last=1.0)
    found = [*changes.card_changes(seen(ONE, TWO), seen())]
    assert [*changes.without_flapping(found, Trends())] == found
    flapping = Trends({(TrendKind.FLAPPING, ONE.id): trend})
    assert [one.card for one in changes.without_flapping(found, flapping)] == [TWO]


def test_a_card_that_is_gone_was_not_uncordoned() -> None:
    before = Cordons(cards={"A": "x", "B": "y"}, present={"A": "npu0", "B": "npu1"})
    gone = Cordons(present={"B": "npu1"})
    assert reported(changes.cordon_entries(before, gone)) == [
        ("good", "npu1 was uncordoned: new Pods get it again")
    ]
    back = replace(before, cards={"A": "z"})
    assert reported(changes.cordon_entries(gone, back)) == [
        ("plain", "npu0 was cordoned, no new Pod gets it: z")
    ]


def test_a_config_that_is_applied_refused_and_corrected() -> None:
    good = ConfigState(loaded_at=1.0)
    bad = replace(good, error="c.yaml:3:1: unknown key\nc.yaml:4:1: another", rejected=1)
    applied = replace(good, generation=2, waiting=("pluginDir",))
    refused = "the config file is refused, the last good one stays in force"
    assert reported(changes.config_entries(good, bad)) == [
        ("bad", f"{refused}: c.yaml:3:1: unknown key; c.yaml:4:1: another")
    ]
    assert reported(changes.config_entries(bad, bad)) == []
    assert reported(changes.config_entries(bad, good)) == [
        ("good", "the config file is good again")
    ]
    assert reported(changes.config_entries(bad, applied)) == [
        ("good", "a new config is applied; a restart is needed for pluginDir")
    ]
    assert reported(changes.config_entries(good, replace(good, generation=2))) == [
        ("good", "a new config is applied")
    ]


def test_a_kubelet_that_restarts() -> None:
    new = SessionStatus(resource="npu", phase=SessionPhase.REGISTERING)
    on = replace(new, phase=SessionPhase.REGISTERED, registrations=1)
    lost = replace(on, phase=SessionPhase.REGISTERING, reason="its stream ended")
    again = replace(on, registrations=2)

    def news(before: SessionStatus, after: SessionStatus) -> list[tuple[str, str]]:
        return reported(changes.session_entries(before, after, "resource"))

    assert news(new, on) == [("good", "the kubelet registered npu")]
    assert news(on, lost) == [("warn", "the kubelet dropped npu: its stream ended")]
    assert news(lost, replace(lost, reason="kubelet.sock is missing")) == []
    assert news(lost, again) == [("good", "the kubelet registered npu again")]
    blocked = replace(new, phase=SessionPhase.BLOCKED, reason="mount it")
    assert news(new, blocked) == [("bad", "npu cannot be served: mount it")]
    assert news(blocked, blocked) == []
    assert news(blocked, replace(blocked, reason="no room")) == [
        ("bad", "npu cannot be served: no room")
    ]
    standby = replace(new, phase=SessionPhase.STANDBY, reason="another agent")
    assert news(new, standby) == [("plain", "npu is on standby: another agent")]
    assert news(on, replace(on, phase=SessionPhase.ENDED)) == []


def test_labels() -> None:
    none = LabelState(output="api")
    there = replace(none, in_place=True, applied_at=5.0)
    failed = replace(there, in_place=False, error="403")
    assert reported(changes.label_entries(none, there)) == [
        ("good", "the Node's labels were applied")
    ]
    assert reported(changes.label_entries(there, there)) == []
    assert reported(changes.label_entries(there, failed)) == [
        ("warn", "the Node's labels were not applied: 403")
    ]
    assert reported(changes.label_entries(failed, failed)) == []


def holds(card: CardState, pod: str, core: int) -> Usage:
    who = Assignment("ml", pod, "main", "npu", card.id)
    return Usage(card.id, CoreRange(core, core), who)


def test_who_is_given_a_card_and_releases_one() -> None:
    both = seen(ONE, TWO)
    train, other = holds(ONE, "train", 0), holds(TWO, "other", 0)
    found = reported(changes.usage_entries([train], [other], both, both))
    assert found == [("plain", "ml/train released npu0"), ("plain", "ml/other was given npu1")]
    more = holds(ONE, "train", 1)
    assert reported(changes.usage_entries([train], [train, more], both, both)) == []


def test_a_holding_that_changes_with_its_card_is_no_news() -> None:
    train = holds(ONE, "train", 0)
    assert reported(changes.usage_entries([train], [], seen(ONE), seen())) == []
    assert reported(changes.usage_entries([], [train], seen(), seen(ONE))) == []
