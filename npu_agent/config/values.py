"""A parsed file before validation: texts, lists and mappings, with their places and errors.

Files and command-line options both become a `ParsedFile`. A YAML scalar stays its text: YAML 1.1
takes 010 for 8, `on` for true and 0000:01:00.0 for a number. Here the key decides what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from npu_agent.text import shown

Value: TypeAlias = "str | list[Value] | dict[str, Value]"

MAX_BYTES = 1 << 18
"""The largest file that is read: room for 5,000 disabled cards, and loaded in about a second."""
_MAX_PROBLEMS = 20
_MAX_DEPTH = 10
"""Lists and groups within each other; the schema has three."""
_NULLS = ("", "~", "null", "Null", "NULL")
# All but what YAML calls printable (YAML 1.2, 5.1), and half surrogate pairs from "\ud800".
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Null(str):
    """YAML's way to write nothing: one of `_NULLS` without quotes."""

    __slots__ = ()


def scalar(text: str) -> str:
    """A text that stands there without quotes."""
    return Null(text) if text in _NULLS else text


@dataclass(frozen=True)
class Place:
    """The place of a value: a file as the user named it, or an option (`--interval`)."""

    source: str
    line: int | None = None
    """Counted from 1; None for an option, or for a file as a whole."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """An error in a configuration, for the person who wrote it."""

    place: Place
    key: str = ""
    """The dotted key as the file spells it (`resources[0].family`); "" for bad YAML."""
    message: str

    def __str__(self) -> str:
        # An option's name says all that its key would say.
        if self.key and not self.place.source.startswith("--"):
            return f"{self.place}: {shown(self.key)}: {self.message}"
        return f"{self.place}: {self.message}"


class ConfigError(Exception):
    """A configuration that is refused: the first 20 problems, by line."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        by_line = sorted(problems, key=lambda problem: problem.place.line or 0)
        self.problems = tuple(by_line[:_MAX_PROBLEMS])
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, place: Place, message: str) -> ConfigError:
        """An error of one problem that does not belong to a key."""
        return cls([ConfigProblem(place=place, message=message)])


@dataclass
class ParsedFile:
    """A whole configuration as a user wrote it."""

    value: Value
    places: dict[str, Place]
    """Of each key and item, by its dotted name (`resources[0].family`); "": of all."""
    problems: list[ConfigProblem] = field(default_factory=list)
    """Keys that are there twice, and then what is wrong with the values."""

    def wrong(self, path: str, message: str) -> None:
        """Adds a problem with the key or item of this dotted name."""
        self.problems.append(ConfigProblem(place=self.places[path], key=path, message=message))


def parsed_yaml(data: bytes, source: str) -> ParsedFile:
    """The one document in this YAML text; errors call it `source`.

    Raises:
        ConfigError: larger than `MAX_BYTES`, not UTF-8, not YAML, more than one document, or
            something in it that a configuration has no use for: aliases, tags, control characters.
    """
    import yaml  # 10 ms, for nothing without a file

    if len(data) > MAX_BYTES:
        message = "larger than 256 KiB: this is not a configuration of npu-agent"
        raise ConfigError.at(Place(source), message)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError.at(Place(source, line), "not UTF-8: save the file as UTF-8") from None
    # Without libyaml it is slower, and words its errors a little differently.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Document(yaml.parse(text, Loader=loader), source).written
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two: PyYAML without libyaml, on escapes such as "\UFFFFFFFF".
        raise _syntax_error(error, text, source) from None


class _Document:
    """Makes values of YAML's events. PyYAML's own would resolve aliases, and drop keys."""

    def __init__(self, events: Iterator[Any], source: str) -> None:
        self.events = events
        self.source = source
        self.written = ParsedFile({}, {})
        for event in events:
            if type(event).__name__ == "DocumentStartEvent":
                if self.written.places:
                    message = "a second document starts here: put all keys into one"
                    raise ConfigError.at(self._place(event), message)
                self.written.value = self._value(next(events), "", 0)
        self.written.places.setdefault("", Place(source))

    def _place(self, event: Any) -> Place:
        return Place(self.source, event.start_mark.line + 1)

    def _value(self, event: Any, path: str, depth: int) -> Value:
        place = self._place(event)
        kind = type(event).__name__
        if kind == "AliasEvent":
            message = f"an alias ({shown(f'*{event.anchor}')}): write the value out instead"
            raise ConfigError.at(place, message)
        if event.tag:
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise ConfigError.at(place, f"a tag ({tag}): write the value without it")
        self.written.places.setdefault(path, place)
        if kind == "ScalarEvent":
            if match := _FORBIDDEN.search(event.value):
                message = f"a control character (U+{ord(match[0]):04X}): take it out"
                raise ConfigError.at(place, message)
            # libyaml calls the style of a plain scalar "", PyYAML's own parser None.
            return str(event.value) if event.style else scalar(event.value)
        if depth == _MAX_DEPTH:
            message = f"more than {_MAX_DEPTH} lists and groups within each other"
            raise ConfigError.at(place, message)
        if kind == "MappingStartEvent":
            return self._mapping(path, depth)
        return [
            self._value(item, f"{path}[{index}]", depth + 1)
            for index, item in enumerate(self._until("SequenceEndEvent"))
        ]

    def _mapping(self, path: str, depth: int) -> dict[str, Value]:
        entries: dict[str, Value] = {}
        for event in self._until("MappingEndEvent"):
            place = self._place(event)
            key = self._value(event, "", depth + 1)
            if not isinstance(key, str):
                raise ConfigError.at(place, "a key must be a plain word")
            at = f"{path}.{key}" if path else key
            if key in entries:
                message = f"is in line {self.written.places[at].line} already: keep one of the two"
                self.written.problems.append(ConfigProblem(place=place, key=at, message=message))
            self.written.places.setdefault(at, place)
            entries.setdefault(key, self._value(next(self.events), at, depth + 1))
        return entries

    def _until(self, end: str) -> Iterator[Any]:
        return iter(lambda: None if type(e := next(self.events)).__name__ == end else e, None)


def _syntax_error(error: Any, text: str, source: str) -> ConfigError:
    """YAML's own words on one line, with the place where it began if that is another line."""
    mark = getattr(error, "problem_mark", None)
    begin = getattr(error, "context_mark", None)
    if mark is None:  # control characters, of which `reason` says which ones
        what = getattr(error, "reason", error)
        return ConfigError.at(Place(source), f"not YAML: {what}")
    lines = text.splitlines()
    line = min(mark.line, len(lines) - 1)  # the end of the text may be behind its last newline
    place = Place(source, line + 1)
    if lines[line][mark.column :].startswith("\t"):
        return ConfigError.at(place, "not YAML: a tab: indent with spaces")
    message = f"not YAML: {error.problem} {error.context or ''}".rstrip()
    if begin is not None and begin.line < line:
        message += f" that begins in line {begin.line + 1}"
    return ConfigError.at(place, message)
