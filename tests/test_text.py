from __future__ import annotations

import errno

import pytest

from npu_agent.text import closest, listed, natural, one_line, quoted, reason, shown


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("10s", "10s"),
        ("", '""'),
        (" a", '" a"'),
        ("a\nb", '"a\\nb"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 60 + "…"),
    ],
)
def test_shown(text: str, short: str) -> None:
    assert shown(text) == short


def test_quoted_is_always_in_quotes() -> None:
    assert quoted("npu0") == "'npu0'"
    assert quoted("\x1b[31m") == "'\\x1b[31m'"
    assert quoted("x" * 81) == f"'{'x' * 80}'..."


def test_foreign_text_becomes_one_line() -> None:
    assert one_line("a\n  b\x1b[31m") == "a b?[31m"
    assert one_line("x" * 300) == "x" * 300
    assert one_line("x" * 301) == "x" * 299 + "…"
    assert one_line(TimeoutError()) == "TimeoutError"


def test_natural_order() -> None:
    words = ["temp10", "temp2", "1.10.0", "1.9.2", "temp"]
    assert sorted(words, key=natural) == ["1.9.2", "1.10.0", "temp", "temp2", "temp10"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("RNGDD", "rngd"),
        ("warboi", "Warboy"),
        ("npi3", "npu3"),
        ("npu9", None),
        ("x", None),
        ("", None),
    ],
)
def test_the_likely_meant_name(word: str, meant: str | None) -> None:
    """A card with another number is none that was misspelt."""
    assert closest(word, ("rngd", "Warboy", "npu3")) == meant


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EIO, "Input/output error", "/sys/x"), "/sys/x: Input/output error"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("odd"), "odd"),
        (ValueError("odd"), "odd"),
    ],
)
def test_the_reason_of_an_error(error: Exception, words: str) -> None:
    assert reason(error) == words


def test_the_first_names_and_how_many_more_there_are() -> None:
    names = ("npu0", "npu1", "npu2")
    assert [listed(names, most) for most in (1, 2, 3)] == [
        "npu0 and 2 more",
        "npu0, npu1 and 1 more",
        "npu0, npu1, npu2",
    ]
