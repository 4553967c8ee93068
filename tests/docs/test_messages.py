"""What troubleshooting.md, dra.md and kubelet.md quote as the agent's words is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .pages import ROOT, page

ELLIPSIS = "…"


def texts() -> Iterator[str]:
    """Each text of the source, with an ellipsis where it puts something in."""
    for path in sorted((ROOT / "npu_agent").rglob("*.py")):
        if path.is_relative_to(ROOT / "npu_agent/kubelet/wire"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else ELLIPSIS
                    for part in node.values
                )


TEXTS = frozenset(texts())


def quoted(name: str, heading: str) -> Iterator[str]:
    """What stands between backticks in the first column of tables with this heading."""
    table = re.compile(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
    for rows in table.findall(page(name).text):
        for row in rows.splitlines():
            cell = re.split(r"(?<!\\)\|", row)[1]
            yield from re.findall(r"`([^`]+)`", cell.replace("\\|", "|"))


def said(message: str) -> bool:
    """Whether a text of the source has all parts of the message, one after the other."""
    parts = [re.escape(part.strip()) for part in message.split(ELLIPSIS) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in TEXTS)


def quotes() -> list[str]:
    found = [
        *quoted("docs/troubleshooting.md", "npu-agent says"),
        *(text for text in quoted("docs/dra.md", "npu-agent says") if not text.startswith("Pod ")),
        *(log for line in quoted("docs/kubelet.md", "log line") for log in line.split(" ... ")),
    ]
    return sorted(set(found))


def test_messages_are_found() -> None:
    assert len(quotes()) > 40


@pytest.mark.parametrize("message", quotes())
def test_the_agent_says_so(message: str) -> None:
    assert said(message)
