from __future__ import annotations

import pytest

from npu_agent.core.trouble import Trouble


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
