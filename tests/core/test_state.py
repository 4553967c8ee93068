"""Who holds what, and what is stale, disabled or withheld, as the state of the agent has it."""

import pytest

from npu_agent.core.hardware import CoreRange
from npu_agent.core.state import stale_after
from npu_agent.kubelet.podresources import Holdings
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import Scene, held, read


def test_usages_of_a_card() -> None:
    card, other = state(), state(index=1)
    pods = (held(card, "b", CoreRange(1, 1)), held(card, "a", CoreRange(0, 0)))
    found = Scene(cards=(card, other), holdings=Holdings(assignments=pods)).state()
    holders = [(one.assignment.pod, str(one.cores)) for one in found.usages_of(card)]
    assert holders == [("a", "0"), ("b", "1")]
    assert found.usages_of(other) == ()
    assert found.gone == ()


def test_a_reading_is_stale_after_three_intervals_and_ten_seconds_at_least() -> None:
    assert [stale_after(interval) for interval in (1.0, 5.0, 60.0)] == [10.0, 15.0, 180.0]
    fresh, old, none = read(state(), age=9), read(state(index=1), age=16), state(index=2)
    found = Scene(cards=(fresh, old, none)).state()
    assert [found.is_stale(card) for card in (fresh, old, none)] == [False, True, False]


@pytest.mark.parametrize("jump", [0.0, 315e6, -315e6])
def test_times_of_day_are_by_the_wall_clock_as_it_was_set_last(jump: float) -> None:
    card = read(state(), age=16)
    found = Scene(cards=(card,), jump=jump).state()
    assert card.reading
    assert found.now - found.wall(card.reading.at) == pytest.approx(16, abs=5)
    assert found.is_stale(card)
    assert found.wall(found.monotonic + 60) == found.now, "nothing has happened in the future"
