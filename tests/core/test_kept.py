from collections import Counter

import pytest

from npu_agent.core.kept import kept


class Asked:
    """A function that counts how often it was called."""

    def __init__(self) -> None:
        self.times: Counter[object] = Counter()
        self.kept = kept(self._made)

    def _made(self, card: str, core: int) -> tuple[str, int]:
        self.times[card, core] += 1
        return (card, core)

    def all(self, cards: list[str]) -> None:
        for card in cards:
            for core in range(8):
                assert self.kept(card, core) == (card, core)


@pytest.mark.parametrize("number", [1, 8, 500])
def test_whatever_is_asked_for_again_and_again_is_kept(number: int) -> None:
    asked, cards = Asked(), [str(index) for index in range(number)]
    for _ in range(3):
        asked.all(cards)
    assert max(asked.times.values()) <= 2  # many at first look like some that are not needed
    made = asked.times.copy()
    for turn in range(40):
        asked.all([*cards, f"new {turn // 10}"])
    assert {key: asked.times[key] for key in made} == made


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    asked = Asked()
    for turn in range(400):  # each time one of three cards is swapped
        asked.all([f"slot 0, {turn // 4}", f"slot 1, {turn // 4}", "stays"])
    assert asked.times["stays", 0] == 1
    asked.all(["slot 0, 0"])
    assert asked.times["slot 0, 0", 0] == 2
    kept_now = sum(1 for turn in range(100) if _was_kept(asked, f"slot 0, {turn}"))
    assert kept_now < 20


def _was_kept(asked: Asked, card: str) -> bool:
    before = asked.times[card, 0]
    asked.kept(card, 0)
    return asked.times[card, 0] == before


def test_none_is_a_result_like_any_other() -> None:
    times = 0

    @kept
    def nothing(_: int) -> None:
        nonlocal times
        times += 1

    nothing(1)
    nothing(1)
    assert times == 1
