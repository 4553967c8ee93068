"""What lasts on cards begins once and ends once."""

from collections.abc import Sequence
from dataclasses import replace

from npu_agent.core.hardware import CardState, Reading, Sensor, SensorKind, Snapshot
from npu_agent.core.trends import TrendKind, Trends, hot_above, step
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


def test_a_card_is_hot_until_it_is_some_degrees_cooler() -> None:
    one = History()
    assert one.then(at(ONE, 90.0)) == []
    assert one.then(at(ONE, 90.1)) == [("hot", "A")]
    for temperature in (89.0, 91.0, 101.0, 85.1):
        assert one.then(at(ONE, temperature)) == [("hot", "A")]
    (trend,) = one.trends.of(TrendKind.HOT).values()
    assert (trend.since, trend.detail) == (2.0, "above 90 °C")
    assert one.then(at(ONE, 85.0)) == []
    assert one.then(at(ONE, 89.0)) == []
    assert (hot_above(None), hot_above(80.0), hot_above(105.0)) == (90.0, 80.0, 90.0)


def test_errors_rise_until_there_was_none_for_a_quarter_of_an_hour() -> None:
    one = History()
    assert one.then(at(ONE, axi=7)) == [], "they may be from last year"
    assert one.then(at(ONE, axi=7)) == []
    assert one.then(at(ONE, axi=9, pcie=1)) == [("errors", "A")]
    assert one.trends.of(TrendKind.ERRORS)["A"].detail == "axi, pcie"
    assert one.then(at(ONE, axi=10, pcie=1), after=800) == [("errors", "A")]
    assert one.then(at(ONE, axi=10, pcie=1), after=800) == [("errors", "A")]
    assert one.trends.of(TrendKind.ERRORS)["A"].since == 3.0
    assert one.then(at(ONE, axi=10, pcie=1), after=100) == []
    assert one.then(at(ONE)) == [], "the driver was loaded again"


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


def test_two_cards_with_one_uuid() -> None:
    one, twin = History(), replace(TWO, card=replace(TWO.card, uuid="A"))
    assert one.then(ONE, twin) == [("twins", "A"), ("twins", "B")]
    assert one.trends.of(TrendKind.TWINS)["A"].detail == "A"
    assert one.then(ONE, TWO) == []
    nameless = [replace(each, card=replace(each.card, uuid=None)) for each in (ONE, TWO)]
    assert one.then(*nameless) == []
