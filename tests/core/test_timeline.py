"""The timeline: bounded, and what repeats is counted."""

from dataclasses import replace

from npu_agent.core.kinds import NamedCard
from npu_agent.core.timeline import (
    GONE,
    MOST,
    SPAN,
    Subject,
    Timeline,
    TimelineEntry,
)
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import read


def one(text: str, subject: Subject = "card", card: NamedCard | None = None) -> TimelineEntry:
    cards = (card,) if card else ()
    return TimelineEntry("NPUGiven", cards, facts={"pod": text}, subject=subject)


def texts(timeline: Timeline, now: float) -> list[str]:
    return [str(entry.facts["pod"]) for entry in timeline.entries(now)]


def test_the_latest_comes_first() -> None:
    found = Timeline().with_entries([one("a")], 1.0).with_entries([one("b", "config")], 2.0)
    found = found.with_entries([one("c")], 3.0)
    assert texts(found, 4.0) == ["c", "b", "a"]
    assert [entry.at for entry in found.entries(4.0)] == [3.0, 2.0, 1.0]


def test_a_repeated_entry_is_counted() -> None:
    found = Timeline()
    for at in range(6):
        found = found.with_entries([one("down"), one("up")], float(at))
    found = found.with_entries([one("down", card=NamedCard("A", "npu0"))], 7.0)
    entries = {(entry.facts["pod"], entry.card): entry for entry in found.entries(8.0)}
    assert len(entries) == 3
    down = entries["down", None]
    assert (down.count, down.first, down.at) == (6, 0.0, 5.0)


def test_the_timeline_is_bounded_for_each_subject() -> None:
    """A Job that makes a Pod a second does not displace the card that died at night."""
    found = Timeline().with_entries([one("npu0 died")], 0.0)
    for at in range(500):
        found = found.with_entries([one(f"pod-{at}", "assignments")], float(at))
    shown = texts(found, 500.0)
    assert len(shown) == MOST + 1
    assert "npu0 died" in shown
    assert shown[0] == "pod-499"


def test_the_timeline_forgets_after_a_day() -> None:
    found = Timeline().with_entries([one("a")], 0.0)
    assert texts(found, SPAN - 1) == ["a"]
    assert texts(found, SPAN + 1) == []
    found = found.with_entries([one("b")], SPAN + 1)
    assert found.with_entries([one("a")], SPAN + 2).entries(SPAN + 2)[0].count == 1


def test_a_text_of_any_length_costs_little() -> None:
    assert len(texts(Timeline().with_entries([one("x" * 10_000)], 0.0), 1.0)[0]) == 300


def test_cards_that_left() -> None:
    card, other = read(state(uuid="A")), state(index=1, uuid="B")
    found = Timeline().left([card], [other], 5.0)
    (gone,) = found.gone
    assert (gone.state.card, gone.since, gone.state.reading) == (card.card, 5.0, None)
    back = replace(card, card=replace(card.card, index=7))
    assert found.left([], [other, back], 6.0).gone == (), "it is back by another number"
    assert found.left([], [other], 5.0 + SPAN + 1).gone == (), "a day is over"


def test_cards_that_left_are_bounded() -> None:
    found = Timeline()
    for index in range(200):
        found = found.left(
            [state(index=index, id_=f"I{index}", uuid=f"U{index}")], [], float(index)
        )
    assert len(found.gone) == GONE
    assert found.gone[0].state.id == "I199"
