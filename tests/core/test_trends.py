"""What lasts on cards begins once and ends once."""

from collections.abc import Sequence
from dataclasses import replace

from npu_agent.core.hardware import CardState, Limits, Reading, Sensor, SensorKind, Snapshot
from npu_agent.core.health import Policy
from npu_agent.core.kinds import Message
from npu_agent.core.trends import TrendKind, Trends, hot_above, step
from npu_agent.people.cards import at_one_moment
from tests.outputs.deviceplugin.helpers import state

ONE, TWO = state(uuid="A", id_="A"), state(index=1, uuid="B", id_="B")


def at(card: CardState, temperature: float = 40.0, **errors: int) -> CardState:
    sensor = Sensor(SensorKind.TEMPERATURE, "peak", round(temperature * 1_000))
    return replace(card, reading=Reading(at=1.0, errors=(*errors.items(),), sensors=(sensor,)))


def seen(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


class History:
    """One card, step by step."""

    def __init__(self) -> None:
        self.trends, self.last, self.now = Trends(), Snapshot(), 0.0

    def then(
        self, *cards: CardState, after: float = 1.0, changed: Sequence[CardState] = ()
    ) -> list[tuple[str, str]]:
        self.now += after
        found = seen(*cards)
        self.trends = step(self.trends, self.last, found, changed, self.now)
        self.last = found
        return [(kind.value, id_) for kind, id_ in self.trends.found]


def above(limit: float) -> tuple[Message]:
    return (Message("AboveLimit", facts={"limit": limit}),)


def by_driver(reasons: str) -> Message:
    return Message("Throttled", facts={"reasons": reasons})


def test_a_card_is_hot_until_it_is_some_degrees_cooler() -> None:
    one = History()
    assert one.then(at(ONE, 90.0)) == []
    assert one.then(at(ONE, 90.1)) == [("hot", "A")]
    for temperature in (89.0, 91.0, 101.0, 85.1):
        assert one.then(at(ONE, temperature)) == [("hot", "A")]
    (trend,) = one.trends.of(TrendKind.HOT).values()
    assert (trend.since, trend.detail) == (2.0, above(90.0))
    assert one.then(at(ONE, 85.0)) == []
    assert one.then(at(ONE, 89.0)) == []
    assert [hot_above(ONE, limit) for limit in (None, 80.0, 105.0)] == [90.0, 80.0, 90.0]


def test_a_card_is_hot_where_its_driver_slows_it_down() -> None:
    reading = Reading(at=1.0, limits=Limits(slowdown=80.0))
    card = replace(ONE, reading=reading)
    assert [hot_above(card, limit) for limit in (None, 70.0, 85.0)] == [80.0, 70.0, 80.0]
    assert (
        hot_above(replace(ONE, reading=Reading(at=1.0, limits=Limits(slowdown=95.0))), None) == 95
    )
    one = History()
    warm = at(ONE, 81.0)
    assert warm.reading is not None
    warm = replace(warm, reading=replace(warm.reading, limits=Limits(slowdown=80.0)))
    assert one.then(warm) == [("hot", "A")]
    assert one.trends.of(TrendKind.HOT)["A"].detail == above(80.0)


def test_a_card_is_slow_once_it_has_been_so_for_long_enough() -> None:
    one, reading = History(), Reading(at=1.0, throttle=("thermal_slowdown",))
    slow, fast = replace(ONE, reading=reading), replace(ONE, reading=replace(reading, throttle=()))
    assert one.then(slow) == []
    assert one.then(slow, after=299.0) == []
    assert one.then(slow) == [("slow", "A")]
    (trend,) = one.trends.of(TrendKind.SLOW).values()
    assert (trend.since, trend.detail) == (1.0, (by_driver("thermal slowdown"),))
    assert one.then(fast) == []
    assert one.then(slow, after=400.0) == [], "it begins anew"


def test_cards_are_not_compared_where_that_is_off() -> None:
    slow = replace(ONE, reading=Reading(at=1.0, throttle=("thermal_slowdown",)))
    known = step(Trends(), Snapshot(), seen(slow), (), 0.0, Policy(slow_after=0))
    assert step(known, seen(slow), seen(slow), (), 9_999.0, Policy(slow_after=0)).found == {}


def test_a_limit_shows_in_one_moment_but_a_reason_to_throttle_does_not() -> None:
    limits = Limits(power=225.0, default_power=300.0)
    limited = replace(ONE, reading=Reading(at=1.0, limits=limits, throttle=("app_power_cap",)))
    throttled = replace(TWO, reading=Reading(at=1.0, throttle=("hw_power_cap",)))
    [(at_, trend)] = at_one_moment(seen(limited, throttled)).found.items()
    assert at_ == (TrendKind.SLOW, "A")
    assert trend.detail == (
        Message("PowerLimitBelowDefault", facts={"own": 225.0, "other": 300.0}),
        by_driver("app power cap"),
    )


def test_errors_rise_until_there_was_none_for_a_quarter_of_an_hour() -> None:
    one = History()
    assert one.then(at(ONE, axi=7, pcie=0)) == [], "they may be from last year"
    assert one.then(at(ONE, axi=7, pcie=0)) == []
    assert one.then(at(ONE, axi=9, pcie=1)) == [("errors", "A")]
    assert one.trends.of(TrendKind.ERRORS)["A"].detail == ("axi, pcie",)
    assert one.then(at(ONE, axi=10, pcie=1), after=800) == [("errors", "A")]
    assert one.then(at(ONE, axi=10, pcie=1), after=800) == [("errors", "A")]
    assert one.trends.of(TrendKind.ERRORS)["A"].since == 3.0
    assert one.then(at(ONE, axi=10, pcie=1), after=100) == []
    assert one.then(at(ONE)) == [], "the driver was loaded again"


def test_other_words_of_the_driver_about_errors_are_errors_too() -> None:
    def says(text: str | None) -> CardState:
        return replace(ONE, reading=Reading(at=1.0, error_text=text))

    one = History()
    for quiet in ("0x3", "0x3", None, "0x1", "0x00"):
        assert one.then(says(quiet)) == [], quiet
    assert one.then(says("0x2"), after=5) == [("errors", "A")]
    trend = one.trends.of(TrendKind.ERRORS)["A"]
    assert (trend.detail, trend.counted) == (("0x2",), False)
    assert one.then(says("0x3"), after=800) == [("errors", "A")]
    assert one.trends.of(TrendKind.ERRORS)["A"].since == trend.since, "it is one trend"
    assert one.then(says("0x3"), after=899) == [("errors", "A")]
    assert one.then(says("0x3")) == []


def test_a_card_flaps_until_it_is_steady_for_some_minutes() -> None:
    one = History()
    for _ in range(5):
        assert one.then(ONE, changed=[ONE], after=60) == []
    assert one.then(changed=[ONE], after=60) == [("flapping", "A")]
    assert one.trends.of(TrendKind.FLAPPING)["A"].since == 60.0
    for _ in range(20):
        assert one.then(changed=[ONE], after=200) == [("flapping", "A")]
    assert one.then(ONE, after=299) == [("flapping", "A")]
    assert one.then(ONE, after=1) == []
    assert len(one.trends.changes["A"]) == 6, "nothing grows"


def test_a_card_that_fails_seldom_does_not_flap() -> None:
    one = History()
    for _ in range(20):
        assert one.then(ONE, changed=[ONE], after=400) == []


def test_a_card_with_another_identity_after_each_reset_fills_no_memory() -> None:
    one = History()
    for number in range(300):
        card = state(uuid=f"U{number}", id_=f"U{number}")
        one.then(card, changed=[card])
    assert [*one.trends.changes] == [f"U{number}" for number in range(172, 300)]
    one.then(ONE, changed=[ONE], after=1799)
    assert [*one.trends.changes] == ["U299", "A"], "nor is what was half an hour ago kept"


def test_two_cards_with_one_uuid() -> None:
    one, twin = History(), replace(TWO, card=replace(TWO.card, uuid="A"))
    assert one.then(ONE, twin) == [("twins", "A"), ("twins", "B")]
    assert one.trends.of(TrendKind.TWINS)["A"].detail == ("A",)
    assert one.then(ONE, TWO) == []
    nameless = [replace(each, card=replace(each.card, uuid=None)) for each in (ONE, TWO)]
    assert one.then(*nameless) == []


def test_a_link_is_slow_until_it_is_as_its_siblings_are() -> None:
    one = History()
    slow, fast = (replace(ONE, card=replace(ONE.card, link_speed=(s, 32.0))) for s in (16.0, 32.0))
    sibling = replace(TWO, card=replace(TWO.card, link_speed=(32.0, 32.0)))
    assert one.then(slow, sibling) == [("link", "A")]
    assert one.trends.of(TrendKind.LINK)["A"].detail == (
        Message("SlowerLanes", facts={"own": 16.0, "other": 32.0}),
    )
    assert one.then(fast, sibling) == []


def test_errors_that_can_be_read_again_have_not_risen() -> None:
    one = History()
    assert one.then(at(ONE, aer_fatal=5)) == []
    assert one.then(at(ONE)) == []
    assert one.then(at(ONE, aer_fatal=5)) == []
    assert one.then(at(ONE, aer_fatal=6)) == [("errors", "A")]
