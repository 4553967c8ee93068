"""YAML text as a tree in which every value knows its place.

Built from PyYAML's events alone: its own composer and constructors follow YAML 1.1, where 010 is 8,
`on` is true and 0000:01:00.0 is a number, and let the last of two equal keys win. Here a scalar is
its text, and what it means is decided by the key it is given for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml

from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.config.tree import List, Map, Node, Scalar
from npu_agent.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 10
"""Lists and groups within each other; the schema has three."""

# All but what YAML calls printable (YAML 1.2, 5.1), and half surrogate pairs from "\ud800".
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def read_tree(data: bytes, source: str) -> Node | None:
    """The one document in this YAML text, or None if there is nothing but comments.

    Args:
        data: a file's content.
        source: what errors call it.

    Raises:
        ConfigError: not UTF-8, not YAML, more than one document, or something in it that a
            configuration has no use for: aliases, tags, control characters.
    """
    text = _decoded(data, source)
    try:
        return _Builder(text, source).document()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two: PyYAML without libyaml, on escapes such as "\UFFFFFFFF".
        raise _syntax_error(error, text, source) from None


class _Builder:
    """Puts a tree together from the events of one text."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        # Without libyaml it is slower, and words its errors a little differently.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=loader)

    def document(self) -> Node | None:
        tree = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if tree is not None:
                    raise _error(
                        self.place(event), "a second document starts here: put all keys into one"
                    )
                tree = self.node(next(self.events), MAX_DEPTH)
        return tree

    def node(self, event: yaml.Event, depth: int) -> Node:
        place = self.place(event)
        if isinstance(event, yaml.AliasEvent):
            raise _error(
                place, f"an alias ({shown(f'*{event.anchor}')}): write the value out instead"
            )
        if tag := getattr(event, "tag", None):
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            raise _error(place, f"a tag ({shown(tag)}): write the value without it")
        if isinstance(event, yaml.ScalarEvent):
            if found := _FORBIDDEN.search(event.value):
                raise _control_character(place, found)
            # libyaml calls the style of a plain scalar "", PyYAML's own parser None.
            return Scalar(place, event.value, not event.style)
        if not depth:
            raise _error(place, f"more than {MAX_DEPTH} lists and groups within each other")
        if isinstance(event, yaml.SequenceStartEvent):
            return List(place, tuple(self.until(yaml.SequenceEndEvent, depth - 1)))
        children = list(self.until(yaml.MappingEndEvent, depth - 1))
        entries = []
        for key, value in zip(children[::2], children[1::2], strict=True):
            if not isinstance(key, Scalar):
                raise _error(key.place, "a key must be a plain word")
            entries.append((key, value))
        return Map(place, tuple(entries))

    def until(self, end: type[yaml.Event], depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self.events), end):
            yield self.node(event, depth)

    def place(self, event: yaml.Event) -> Place:
        mark = event.start_mark
        if mark is None:  # no parser of PyYAML leaves it out, but its types allow it
            return Place(self.source)
        return Place(self.source, mark.line + 1, mark.column + 1)


def _decoded(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _place_after(error.object[: error.start].decode(errors="replace"), source)
        byte = f"0x{error.object[error.start]:02x}"
        raise _error(place, f"not UTF-8 (byte {byte}): save the file as UTF-8") from None
    if found := _FORBIDDEN.search(text):
        raise _control_character(_place_after(text[: found.start()], source), found)
    return text


def _place_after(text: str, source: str) -> Place:
    return Place(source, text.count("\n") + 1, len(text) - text.rfind("\n"))


def _control_character(place: Place, found: re.Match[str]) -> ConfigError:
    return _error(place, f"a control character (U+{ord(found[0]):04X}): take it out")


def _syntax_error(error: Exception, text: str, source: str) -> ConfigError:
    """YAML's own words on one line, with the place where it began if that is another line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return _error(Place(source), f"not YAML: {error}")
    mark, begin = error.problem_mark, error.context_mark
    if mark is None:
        return _error(Place(source), f"not YAML: {error.problem}")
    lines = text.splitlines()
    line, column = mark.line, mark.column
    if line >= len(lines):  # the end of the text, behind its last newline
        line, column = len(lines) - 1, len(lines[-1])
    place = Place(source, line + 1, column + 1)
    if lines[line][column:].startswith("\t"):
        return _error(place, "not YAML: a tab: indent with spaces")
    message = f"not YAML: {error.problem} {error.context or ''}".rstrip()
    if begin is not None and begin.line < line:
        message += f" that begins in line {begin.line + 1}"
    return _error(place, message)


def _error(place: Place, message: str) -> ConfigError:
    return ConfigError([Problem(place=place, message=message)])
