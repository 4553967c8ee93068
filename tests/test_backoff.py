from hypothesis import given
from hypothesis import strategies as st

from npu_agent.backoff import ApiBackoff, Backoff


@given(st.floats(0.01, 10.0), st.floats(0.01, 1000.0), st.integers(0, 10_000))
def test_pauses_stay_within_their_bounds(first: float, longest: float, tries: int) -> None:
    backoff = Backoff(first=first, longest=longest, tries=tries)
    expected = min(longest, first * 2.0 ** min(tries, 500))
    assert 0.8 * expected <= backoff.next() <= 1.2 * expected
    assert backoff.tries == tries + 1


def test_a_try_that_went_well_starts_anew() -> None:
    backoff = Backoff(first=1.0, longest=10.0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 1.2


@given(st.integers(0, 10_000), st.none() | st.floats(0.0, 300.0))
def test_the_api_server_is_asked_again_after_what_it_asks_for_and_full_jitter(
    tries: int, retry_after: float | None
) -> None:
    pause, asked_for = ApiBackoff(tries=tries), retry_after or 0.0
    assert (
        asked_for <= pause.next(retry_after) <= asked_for + min(60.0, 0.5 * 2.0 ** min(tries, 99))
    )
    assert pause.tries == tries + 1


def test_agents_that_wait_for_the_api_server_are_spread_over_a_minute() -> None:
    pauses = sorted(ApiBackoff(tries=100).next() for _ in range(6000))
    for tenth in range(10):  # a tenth of them in each tenth of it
        of_this = [one for one in pauses if 6 * tenth <= one < 6 * tenth + 6]
        assert 450 <= len(of_this) <= 750


def test_the_first_pauses_before_the_api_server_is_asked_again_are_short() -> None:
    pause = ApiBackoff()
    assert pause.next() <= 0.5
    assert pause.next() <= 1.0
    pause.reset()
    assert pause.next() <= 0.5
