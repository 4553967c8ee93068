"""The project's Markdown: which pages there are, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]

_SKIPPED = {"node_modules", "build", "dist"}
_FENCE = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^ *(?P=fence)[^\S\n]*$",
    re.MULTILINE | re.DOTALL,
)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """``docs/labels.md``."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and content of each code block."""
        return [_block(match) for match in _FENCE.finditer(self.text)]

    def below(self, heading: str) -> list[tuple[str, str]]:
        """Language and content of each code block between this heading and the next one."""
        starts = [*re.finditer(r"^#+ +(.+?) *#*$", _FENCE.sub(_blank, self.text), re.MULTILINE)]
        ends = [match.start() for match in starts[1:]] + [len(self.text)]
        for start, end in zip(starts, ends, strict=True):
            if start[1] == heading:
                return [_block(match) for match in _FENCE.finditer(self.text, start.end(), end)]
        raise LookupError(f"{self.name}: there is no heading {heading!r}")

    @cached_property
    def prose(self) -> str:
        """The page without its code blocks and comments."""
        return re.sub("<!-- .*? -->", "", _FENCE.sub("", self.text))

    @cached_property
    def inline(self) -> list[str]:
        """What stands between backticks in the prose; a pipe in a table is written ``\\|``."""
        return [
            " ".join(match[2].replace("\\|", "|").split()) for match in _CODE.finditer(self.prose)
        ]

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """Level and text of each heading."""
        found = re.finditer(r"^(#{1,6}) +(.+?) *#*$", self.prose, re.MULTILINE)
        return [(len(match[1]), match[2]) for match in found]

    @cached_property
    def anchors(self) -> set[str]:
        """What may stand after ``#`` in a link to this page, as GitHub makes it of headings."""
        found: dict[str, int] = {}
        anchors = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", self.prose))
        for _, heading in self.headings:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = found[anchor] = found.get(anchor, -1) + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
        return anchors

    @cached_property
    def links(self) -> list[str]:
        """The target of each link and picture."""
        return _LINK.findall(_CODE.sub("``", self.prose))


def _block(match: re.Match[str]) -> tuple[str, str]:
    return match["language"].strip(), dedent(match["code"])


def _blank(match: re.Match[str]) -> str:
    """As long as a code block, so that what stands below it stays where it is."""
    return " " * len(match[0])


def pages() -> tuple[Page, ...]:
    """Every page of the project."""
    return tuple(map(Page, sorted(_below(ROOT))))


def _below(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name in _SKIPPED or path.is_symlink():
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.suffix == ".md":
            yield path


def page(name: str) -> Page:
    """The page of that name, relative to the project's root."""
    return Page(ROOT / name)
