from __future__ import annotations

import errno

import pytest

from npu_agent.core.trouble import Trouble, TroubleKind, kind_of


@pytest.mark.parametrize(
    ("trouble", "line"),
    [
        (Trouble(what="no socket"), "no socket"),
        (Trouble(what="no socket", remedy="start it"), "no socket: start it"),
        (
            Trouble(what="no socket", cause="Permission denied", remedy="start it"),
            "no socket: Permission denied: start it",
        ),
    ],
)
def test_one_line_for_people(trouble: Trouble, line: str) -> None:
    assert str(trouble) == line


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, TroubleKind.DENIED),
        (errno.ENOENT, TroubleKind.MISSING),
        (errno.ECONNREFUSED, TroubleKind.REFUSED),
        (errno.ETIMEDOUT, TroubleKind.TIMEOUT),
        (errno.EIO, TroubleKind.OTHER),
    ],
)
def test_the_kind_is_the_error_numbers_not_its_words(number: int, kind: TroubleKind) -> None:
    assert kind_of(OSError(number, "Permission denied, refused, missing")) is kind


def test_an_error_of_no_number() -> None:
    assert kind_of(TimeoutError()) is TroubleKind.TIMEOUT
    assert kind_of(ValueError("refused")) is TroubleKind.OTHER
