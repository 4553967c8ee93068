from hypothesis import given
from hypothesis import strategies as st

from npu_agent.backoff import Backoff, spread


@given(
    st.floats(0.01, 10.0),
    st.floats(0.01, 1000.0),
    st.floats(0.0, 10.0),
    st.integers(0, 10_000),
    st.none() | st.floats(0.0, 300.0),
)
def test_pauses_stay_within_their_bounds_after_what_the_server_asks_for(
    first: float, longest: float, least: float, tries: int, retry_after: float | None
) -> None:
    backoff = Backoff(first=first, longest=longest, least=least, tries=tries)
    asked_for = retry_after or 0.0
    limit = max(least, min(longest, first * 2.0 ** min(tries, 500)))
    assert asked_for + least <= backoff.next(retry_after) <= asked_for + limit
    assert backoff.tries == tries + 1


def test_agents_that_wait_for_the_same_are_spread_over_the_whole_pause() -> None:
    pauses = sorted(Backoff(least=10.0, longest=70.0, tries=100).next() for _ in range(6000))
    for tenth in range(10):  # a tenth of them in each tenth of it
        of_this = [one for one in pauses if 10 + 6 * tenth <= one < 16 + 6 * tenth]
        assert 450 <= len(of_this) <= 750


def test_even_tries_of_many_come_evenly_however_long_they_wait() -> None:
    def tries(back: float) -> float:
        """When one of them finds what they wait for, which is back at some time."""
        backoff, now = Backoff(longest=100.0, even=True), 0.0
        while now < back:
            now += backoff.next()
        return now - back

    for back in (300.0, 333.0, 1000.0):
        found = [tries(back) for _ in range(6000)]
        assert max(found) <= 100.0
        for tenth in range(10):
            assert 450 <= sum(tenth * 10 <= one < tenth * 10 + 10 for one in found) <= 750


def test_first_pauses_are_short_and_so_they_are_after_a_try_that_went_well() -> None:
    pause = Backoff()
    assert pause.next() <= 0.5
    assert pause.next() <= 1.0
    pause.reset()
    assert pause.next() <= 0.5


def test_period_is_spread_by_a_fifth() -> None:
    periods = [spread(100.0) for _ in range(1000)]
    assert 80 <= min(periods) < 85
    assert 115 < max(periods) <= 120
