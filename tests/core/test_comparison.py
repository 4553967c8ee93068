"""Cards compared with their siblings: the slow one is found, and what is no fault is not."""

from dataclasses import replace

import pytest

from npu_agent.core.comparison import alike, begun, slow, slow_link
from npu_agent.core.hardware import CardState, CoreReading, Limits, Reading
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


def texts(*cards: CardState) -> dict[str, str]:
    return {id_: found.text for id_, found in slow(cards).items()}


def test_the_slow_card_of_a_host_that_called_it_healthy_for_weeks() -> None:
    slow_card = card(1, mhz=1700, throttle=("app_power_cap",), power=225.0)
    assert texts(card(0), slow_card, card(2), card(3)) == {
        "U1": "1700 MHz, its siblings 2000; power limit 225 W, default 300 W; driver: app power cap"
    }
    alone = texts(slow_card)["U1"]
    assert alone == "power limit 225 W, default 300 W; driver: app power cap"


def test_without_a_default_the_siblings_count() -> None:
    cards = [card(0, power=225.0, default_power=None), card(1, default_power=None)]
    assert texts(*cards) == {"U0": "power limit 225 W, its siblings 300"}
    assert texts(cards[0]) == {}, "one card alone is compared with its own default only"
    assert texts(card(0, clock=1500), card(1)) == {"U0": "clock limit 1500 MHz, its siblings 2147"}
    assert texts(card(0, clock=1500)) == {}


def test_each_reason_to_throttle_but_idle_counts() -> None:
    assert texts(card(0, throttle=("idle", "hw_bus_limit", "bit_9"))) == {
        "U0": "driver: hw bus limit, bit 9"
    }
    assert texts(card(0, throttle=("idle",)), card(1, throttle=None)) == {}


def test_what_is_no_fault() -> None:
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
        assert texts(*cards) == {}


def test_a_limit_of_all_cards_alike_is_one_remark_and_no_fault() -> None:
    cards = [card(index, power=250.0, throttle=("app_power_cap",)) for index in range(8)]
    assert texts(*cards) == {}
    [(of, text)] = alike(cards)
    assert (len(of), text) == (8, "power limit 250 W, default 300 W")
    lower = card(8, power=225.0)
    assert set(texts(*cards, lower)) == {it.id for it in (*cards, lower)}
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
    ("cards", "text"),
    [
        ([linked(0, (32.0, 32.0)), linked(1, (32.0, 32.0))], ""),
        ([linked(0, (16.0, 32.0))], "16 of 32 GT/s"),
        ([linked(0, (2.5, 32.0), (8, 16))], "8 of 16 lanes; 2.5 of 32 GT/s"),
        # The slot is slower than the siblings', of which one is slow itself.
        (
            [linked(0, (16.0, 16.0)), linked(1, (32.0, 32.0)), linked(2, (8.0, 32.0))],
            "16 GT/s, its siblings 32",
        ),
        # A Warboy has PCIe 4.0 and an RNGD 5.0; a host may not say.
        ([linked(0, (16.0, 16.0)), linked(1, (32.0, 32.0), product="other")], ""),
        ([linked(0, (16.0, 16.0)), linked(1, None)], ""),
        ([linked(0, None), linked(1, (32.0, 32.0))], ""),
    ],
)
def test_a_link_is_slow_against_both_of_its_ends_and_the_siblings(
    cards: list[CardState], text: str
) -> None:
    assert slow_link(cards[0], cards) == text
