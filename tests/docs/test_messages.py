"""What pages quote as the agent's messages, in each language, is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .pages import ROOT, page

ELLIPSIS = "…"
PAGES = {
    "docs/troubleshooting.md": "npu-agent says",
    "docs/ko/troubleshooting.md": "npu-agent의 메시지",
    "docs/ja/troubleshooting.md": "npu-agentの出力",
}
"""The first column's heading in the tables of each page."""

OPERATORS = ("alerts", "dra", "health", "kubectl", "monitoring", "pods", "troubleshooting")
MESSAGE = re.compile(r"[a-z][\w'-]*(?: [\w'(),;:…-]+){2,}")
OTHERS = (
    *("cannot allocate", "device class …", "endpoint …", "no healthy devices", "no such key"),
    *("non-empty scheduling gates", "pod … is not allowed"),
    *("previously allocated", "requested number", "resourceclaim not", "unknown Device Plugin"),
    *("kubectl ", "ls -", "lspci ", "npu-agent ", "pipx ", "systemctl "),
    *("a container … still holds", "an unknown holder (…)", "watch of npu0_mgmt"),
)
"""How messages of the kubelet and the scheduler begin, commands, and those put together."""


def texts() -> Iterator[str]:
    """Each text of the source, with an ellipsis where it puts something in.

    The sentences of problems and of the timeline are in a golden file, as they read.
    """
    yield from (ROOT / "tests/wording/golden/en.txt").read_text("utf-8").splitlines()
    for path in sorted((ROOT / "npu_agent").rglob("*.py")):
        if path.is_relative_to(ROOT / "npu_agent/kubelet/wire"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def quotes() -> list[tuple[str, str]]:
    """Page and message."""
    found = {
        (name, text)
        for name, heading in PAGES.items()
        for text in quoted(name, heading)
        if not text.startswith("Pod ")  # the name of a holder follows
    }
    return sorted(found)


@pytest.mark.parametrize(("name", "message"), quotes())
def test_the_agent_says_so(name: str, message: str) -> None:
    assert said(message), name


@pytest.mark.parametrize("folder", ["docs", "docs/ko", "docs/ja"])
def test_log_lines_named_in_the_text_are_in_the_source(folder: str) -> None:
    named = {
        (name, text)
        for name in OPERATORS
        if (ROOT / folder / f"{name}.md").exists()
        for text in page(f"{folder}/{name}.md").inline
        if MESSAGE.fullmatch(text) and not text.startswith(OTHERS)
    }
    assert named
    assert not {(name, text) for name, text in named if not said(text)}
