from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core import health
from npu_agent.core.hardware import Cause, HealthState
from npu_agent.core.health import HealthTracker, Policy, Verdict, begin, step

LETTERS = {
    "g": Verdict(HealthState.HEALTHY, "works"),
    "d": Verdict(HealthState.UNHEALTHY, "alive says 0", Cause.DEAD),
    "b": Verdict(HealthState.UNHEALTHY, "a node is missing", Cause.NODES),
    "s": Verdict(HealthState.UNKNOWN, "the driver does not say"),
}
STATES = {"H": HealthState.HEALTHY, "U": HealthState.UNHEALTHY, "?": HealthState.UNKNOWN}


def courses(looks: str, policy: Policy) -> list[HealthTracker]:
    """The course after each of some looks; the time is their number."""
    verdicts = [replace(LETTERS[letter], reason=f"{letter}{at}") for at, letter in enumerate(looks)]
    found = [begin(verdicts[0], 0.0)]
    for at, verdict in enumerate(verdicts[1:], 1):
        found.append(step(found[-1], verdict, policy, float(at)))
    return found


def states(looks: str, policy: Policy) -> str:
    names = {state: letter for letter, state in STATES.items()}
    return "".join(names[course.health.state] for course in courses(looks, policy))


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # The first look is believed. Two bad looks in a row fence, one does not, whatever is bad.
        ("gbb", "HHU"),
        ("gdb", "HHU"),
        ("gbd", "HHU"),
        ("gbgbgb", "HHHHHH"),
        # Three good looks in a row bring back; a bad one begins the row anew.
        ("bggg", "UUUH"),
        ("bggbggg", "UUUUUUH"),
        ("dggg", "UUUH"),
        # A driver that never says: nothing fences, and silence is as good as it gets.
        ("ssss", "????"),
        ("sbs", "???"),
        ("bsss", "UUU?"),
        ("sbbsss", "??UUU?"),
        ("bssg", "UUUH"),
        # Between healthy and unknown the latest look tells.
        ("gsg", "H?H"),
        ("gsb", "H??"),
        # A row is broken by silence, unless a 0 was the last word: only a 1 takes that back.
        ("gbsb", "HH??"),
        ("gdsd", "HH?U"),
        ("gdssss", "HH????"),
        ("ddssssss", "UUUUUUUU"),
        ("gddssss", "HHUUUUU"),
        ("gddgsg", "HHUUUH"),
        ("dbssss", "UUUUUU"),
        ("dgbsss", "UUUUU?"),
    ],
)
def test_courses(looks: str, expected: str) -> None:
    assert states(looks, Policy(failures=2, recoveries=3)) == expected


def test_a_policy_changed_meanwhile_counts_from_the_next_look() -> None:
    course = courses("gd", Policy(failures=5))[-1]
    strict = Policy(failures=1)
    assert step(course, LETTERS["s"], strict, 2.0).health.state is HealthState.UNKNOWN
    assert step(course, LETTERS["b"], strict, 2.0).health.state is HealthState.UNHEALTHY


LOOKS = st.text("gdbs", min_size=1, max_size=60)
POLICIES = st.builds(Policy, failures=st.integers(1, 5), recoveries=st.integers(1, 5))


@given(LOOKS, POLICIES)
def test_only_enough_bad_looks_fence(looks: str, policy: Policy) -> None:
    found = "U" if looks[0] in "bd" else "-"
    for at, now in enumerate(states(looks, policy)):
        if now == "U" and found != "U":
            # Silence after a 0 is neither here nor there; it is taken out to count the row.
            row = looks[1 : at + 1].replace("s", "") if "d" in looks else looks[1 : at + 1]
            assert set(row[-policy.failures :]) <= set("bd")
            assert len(row) >= policy.failures
        found = now


@given(LOOKS, POLICIES)
def test_enough_bad_looks_in_a_row_always_fence(looks: str, policy: Policy) -> None:
    assert states(looks + "b" * policy.failures, policy)[-1] == "U"
    assert states(looks + "d" * policy.failures, policy)[-1] == "U"


@given(LOOKS, POLICIES)
def test_a_fenced_card_needs_exactly_its_recoveries(looks: str, policy: Policy) -> None:
    fenced = looks + "b" * policy.failures
    back = states(fenced + "g" * policy.recoveries, policy)[len(fenced) :]
    assert back == "U" * (policy.recoveries - 1) + "H"


@given(LOOKS, POLICIES, st.integers(1, 20))
def test_silence_never_fences_and_always_brings_back_unless_a_zero_was_the_last_word(
    looks: str, policy: Policy, count: int
) -> None:
    before = states(looks, policy)[-1]
    after = states(looks + "s" * count, policy)[-1]
    word = looks.replace("b", "").replace("s", "")[-1:]
    if before != "U":
        assert after == "?"
    elif word == "d":
        assert after == "U"
    elif count >= policy.recoveries:
        assert after == "?"


@given(LOOKS, POLICIES)
def test_reason_and_since_change_with_the_state_and_only_with_it(
    looks: str, policy: Policy
) -> None:
    found = courses(looks, policy)
    for at, (before, after) in enumerate(pairwise(found), 1):
        if before.health.state is after.health.state:
            assert after.health == before.health
        else:
            assert after.health.since == at
            assert after.health.reason == f"{looks[at]}{at}"


# Heat.

HOT_AT_90 = Policy(failures=2, recoveries=2, max_temperature=90.0)


def heated(*temperatures: float | None, policy: Policy = HOT_AT_90) -> list[HealthState]:
    """The state after each look at a card that works, at these temperatures."""
    course, states = None, []
    for temperature in temperatures:
        verdict = health.with_heat(LETTERS["g"], temperature, course, policy)
        course = begin(verdict, 0.0) if course is None else step(course, verdict, policy, 0.0)
        states.append(course.health.state)
    return states


def test_heat_fences_and_has_to_fall_by_more_to_bring_back() -> None:
    up, down = HealthState.HEALTHY, HealthState.UNHEALTHY
    assert heated(90, 91, 90, 91, 91) == [up, up, up, up, down]
    # From 85 to 90 °C a card that was not too hot is good, and one that was is not.
    assert heated(86, 86) == [up, up]
    assert heated(91, 86, 86, 86) == [down] * 4
    assert heated(91, 85, 85) == [down, down, up]
    assert heated(91, 85, 85, 88, 88) == [down, down, up, up, up]


def test_heat_is_no_reason_unless_asked_for_and_known() -> None:
    assert heated(200, 200, policy=Policy()) == [HealthState.HEALTHY] * 2
    assert heated(None, None) == [HealthState.HEALTHY] * 2


def test_a_dead_card_is_dead_and_not_hot() -> None:
    dead = LETTERS["d"]
    assert health.with_heat(dead, 200, None, HOT_AT_90) == dead
