"""What counts as a rise, and how a curve is drawn."""

from __future__ import annotations

from random import Random

import pytest

from bench.curve import BLOCKS, drawn, risen

MINUTES = [10.0 * each for each in range(60)]
"""Ten of them, a sample each ten seconds."""


def test_a_value_that_comes_and_goes_is_no_rise() -> None:
    chance = Random(1)
    assert abs(risen([(at, 50 + chance.choice((0, 0, 0, 9))) for at in MINUTES])) < 1


@pytest.mark.parametrize("count", [60, 400])
def test_a_rise_is_found_among_what_comes_and_goes(count: int) -> None:
    chance = Random(1)
    points = [(float(at), 3 * at / count + chance.choice((0, 0, 1))) for at in range(count)]
    assert 2 < risen(points) < 4


def test_a_curve_goes_from_the_lowest_block_to_the_highest() -> None:
    assert drawn([(at, at) for at in MINUTES], width=8) == BLOCKS
    assert drawn([(at, 7) for at in MINUTES], width=5) == BLOCKS[0] * 5
    assert drawn([(0.0, 1), (10.0, 2)]) == BLOCKS[0] + BLOCKS[-1]


def test_a_peak_is_seen_however_short() -> None:
    assert drawn([(at, float(at == 300)) for at in MINUTES], width=4).count(BLOCKS[-1]) == 1
