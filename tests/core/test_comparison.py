"""Cards compared with their siblings: the slow one is found, and what is no fault is not."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from npu_agent.core.comparison import alike, begun, slow, slow_link
from npu_agent.core.hardware import CardState, CoreReading, Limits, Reading
from npu_agent.core.kinds import Message
from tests.outputs.deviceplugin.helpers import state

LIMITS = Limits(power=300.0, default_power=300.0, clock=2147, slowdown=80.0)


def card(
    index: int = 0,
    *,
    mhz: int | None = 2000,
    throttle: tuple[str, ...] | None = (),
    product: str = "",
    **limits: float | None,
) -> CardState:
    """A card as driver 2026.3 shows it, with some limits changed."""
    it = state(index=index, uuid=f"U{index}", id_=f"U{index}")
    it = replace(it, card=replace(it.card, product=product or it.card.product))
    cores = () if mhz is None else (CoreReading(core=0, frequency=mhz),)
    reading = Reading(at=1.0, throttle=throttle, limits=replace(LIMITS, **limits), cores=cores)  # type: ignore[arg-type]
    return replace(it, reading=reading)


Figures = tuple[str, object, object]


def figures(detail: Iterable[Message]) -> list[Figures]:
    """Kind, own figure and the other of each."""
    return [(one.kind, one.facts.get("own"), one.facts.get("other")) for one in detail]


def found(*cards: CardState) -> dict[str, list[Figures]]:
    return {id_: figures(why.detail) for id_, why in slow(cards).items()}


LOWERED = ("PowerLimitBelowDefault", 225.0, 300.0)
DRIVER = ("Throttled", None, None)


def test_the_slow_card_of_a_host_that_called_it_healthy_for_weeks() -> None:
    slow_card = card(1, mhz=1700, throttle=("app_power_cap",), power=225.0)
    assert found(card(0), slow_card, card(2), card(3)) == {
        "U1": [("ClockBelowSiblings", 1700, 2000), LOWERED, DRIVER]
    }
    assert found(slow_card)["U1"] == [LOWERED, DRIVER]
    assert slow([slow_card])["U1"].detail[-1].facts == {"reasons": "app power cap"}


def test_without_a_default_the_siblings_count() -> None:
    cards = [card(0, power=225.0, default_power=None), card(1, default_power=None)]
    assert found(*cards) == {"U0": [("PowerLimitBelowSiblings", 225.0, 300.0)]}
    assert found(cards[0]) == {}, "one card alone is compared with its own default only"
    limited = card(0, clock=1500)
    assert found(limited, card(1)) == {"U0": [("ClockLimitBelowSiblings", 1500, 2147)]}
    assert found(limited) == {}


def test_each_reason_to_throttle_but_idle_counts() -> None:
    (driver,) = slow([card(0, throttle=("idle", "hw_bus_limit", "bit_9"))])["U0"].detail
    assert (driver.kind, driver.facts) == ("Throttled", {"reasons": "hw bus limit, bit 9"})
    assert found(card(0, throttle=("idle",)), card(1, throttle=None)) == {}


def test_cards_that_are_not_slow() -> None:
    for cards in (
        # Full load at the limit that it should have, next to idle cards.
        (card(0, mhz=1800, throttle=("app_power_cap", "app_clock_cap")), card(1)),
        # A governor lowers the clocks of one card, as a diagnosis does for seconds.
        (card(0, mhz=500), card(1), card(2)),
        # Another product has another limit.
        (card(0, power=150.0, default_power=150.0, product="s"), card(1, product="max")),
        # A person has raised the limit of a sibling.
        (card(0), card(1, power=350.0)),
        # A driver that says nothing, and a card that was never read.
        (card(0, power=None, default_power=None, clock=None, throttle=None, mhz=None), card(1)),
        (replace(card(0), reading=None), card(1)),
    ):
        assert found(*cards) == {}


def test_a_limit_of_all_cards_alike_is_one_remark_and_no_fault() -> None:
    cards = [card(index, power=250.0, throttle=("app_power_cap",)) for index in range(8)]
    assert found(*cards) == {}
    [(of, limit)] = alike(cards)
    assert len(of) == 8
    assert figures([limit]) == [("PowerLimitBelowDefault", 250.0, 300.0)]
    lower = card(8, power=225.0)
    assert set(found(*cards, lower)) == {it.id for it in (*cards, lower)}
    assert [*alike([*cards, lower])] == []
    assert [*alike([cards[0]])] == [*alike([card(0), card(1)])] == [*alike([])] == []


def test_beginnings_are_counted_and_not_readings() -> None:
    counted = None
    for throttle in ((), ("a",), ("a", "b"), (), ("a",), None, ("a",)):
        reading = Reading(at=1.0, throttle=throttle)
        counted = replace(reading, throttled=begun(counted, reading))
    assert counted is not None
    assert dict(counted.throttled) == {"a": 3, "b": 1}
    assert begun(None, Reading(at=1.0, throttle=("a",))) == (("a", 1),)


Pair = tuple[float, float] | None


def linked(
    index: int, speed: Pair, lanes: tuple[int, int] = (16, 16), product: str = ""
) -> CardState:
    it = card(index, product=product)
    return replace(it, card=replace(it.card, lanes=lanes, link_speed=speed))


@pytest.mark.parametrize(
    ("cards", "detail"),
    [
        ([linked(0, (32.0, 32.0)), linked(1, (32.0, 32.0))], []),
        ([linked(0, (16.0, 32.0))], [("SlowerLanes", 16.0, 32.0)]),
        ([linked(0, (2.5, 32.0), (8, 16))], [("FewerLanes", 8, 16), ("SlowerLanes", 2.5, 32.0)]),
        # The slot is slower than the siblings', of which one is slow itself.
        (
            [linked(0, (16.0, 16.0)), linked(1, (32.0, 32.0)), linked(2, (8.0, 32.0))],
            [("LanesBelowSiblings", 16.0, 32.0)],
        ),
        # A Warboy has PCIe 4.0 and an RNGD 5.0; a host may not say.
        ([linked(0, (16.0, 16.0)), linked(1, (32.0, 32.0), product="other")], []),
        ([linked(0, (16.0, 16.0)), linked(1, None)], []),
        ([linked(0, None), linked(1, (32.0, 32.0))], []),
    ],
)
def test_a_link_is_slow_against_both_of_its_ends_and_the_siblings(
    cards: list[CardState], detail: list[Figures]
) -> None:
    assert figures(slow_link(cards[0], cards)) == detail
