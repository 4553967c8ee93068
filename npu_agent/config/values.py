"""What a user wrote, before it means anything: texts, lists and mappings, each with its place.

Files and command-line options both become `Written`. A YAML scalar stays its text: YAML 1.1 takes
010 for 8, `on` for true and 0000:01:00.0 for a number, and here the key decides what a text means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.text import shown

if TYPE_CHECKING:
    import yaml

Value: TypeAlias = "str | list[Value] | dict[str, Value]"

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


@dataclass
class Written:
    """A whole configuration as a user wrote it."""

    value: Value
    places: dict[str, Place]
    """Of each key and item, by its dotted name (`resources[0].family`); "": of all."""
    problems: list[Problem] = field(default_factory=list)
    """Keys that are there twice."""


def written_yaml(data: bytes, source: str) -> Written:
    """The one document in this YAML text.

    Args:
        data: a file's content.
        source: what errors call it.

    Raises:
        ConfigError: not UTF-8, not YAML, more than one document, or something in it that a
            configuration has no use for: aliases, tags, control characters.
    """
    import yaml  # 10 ms, for nothing without a file

    text = _decoded(data, source)
    # Without libyaml it is slower, and words its errors a little differently.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = documents = 0
        for event in yaml.parse(text, Loader=loader):
            place = Place(source, event.start_mark.line + 1 if event.start_mark else None)
            _check(event, place)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                message = "a second document starts here: put all keys into one"
                raise ConfigError.at(place, message)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                message = f"more than {_MAX_DEPTH} lists and groups within each other"
                raise ConfigError.at(place, message)
        tree = yaml.compose(text, Loader=loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two: PyYAML without libyaml, on escapes such as "\UFFFFFFFF".
        raise _syntax_error(error, text, source) from None
    written = Written({}, {"": Place(source)})
    if tree is not None:
        written.places[""] = Place(source, tree.start_mark.line + 1)
        written.value = _value(tree, "", written)
    return written


def _check(event: yaml.Event, place: Place) -> None:
    """Raises ConfigError for an alias, a tag or a control character."""
    if type(event).__name__ == "AliasEvent":
        alias = shown(f"*{getattr(event, 'anchor', '')}")
        raise ConfigError.at(place, f"an alias ({alias}): write the value out instead")
    if tag := getattr(event, "tag", None):
        tag = shown(tag.replace("tag:yaml.org,2002:", "!!"))
        raise ConfigError.at(place, f"a tag ({tag}): write the value without it")
    if found := _FORBIDDEN.search(getattr(event, "value", "")):
        raise _control_character(place, found)


def _value(node: yaml.Node, path: str, written: Written) -> Value:
    if isinstance(node.value, str):
        # libyaml calls the style of a plain scalar "", PyYAML's own parser None.
        return node.value if getattr(node, "style", None) else scalar(node.value)
    source, items, entries = written.places[""].source, [], {}
    for index, child in enumerate(node.value):
        if not isinstance(child, tuple):
            at = f"{path}[{index}]"
            written.places[at] = Place(source, child.start_mark.line + 1)
            items.append(_value(child, at, written))
            continue
        key, inner = child
        place = Place(source, key.start_mark.line + 1)
        if not isinstance(key.value, str):
            raise ConfigError.at(place, "a key must be a plain word")
        at = f"{path}.{key.value}" if path else key.value
        if key.value in entries:
            message = f"is in line {written.places[at].line} already: keep one of the two"
            written.problems.append(Problem(place=place, key=at, message=message))
            continue
        written.places[at] = place
        entries[key.value] = _value(inner, at, written)
    return items if type(node).__name__ == "SequenceNode" else entries


def _decoded(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = f"0x{error.object[error.start]:02x}"
        message = f"not UTF-8 (byte {byte}): save the file as UTF-8"
        raise ConfigError.at(Place(source, line), message) from None
    if found := _FORBIDDEN.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise _control_character(Place(source, line), found)
    return text


def _control_character(place: Place, found: re.Match[str]) -> ConfigError:
    return ConfigError.at(place, f"a control character (U+{ord(found[0]):04X}): take it out")


def _syntax_error(error: Exception, text: str, source: str) -> ConfigError:
    """YAML's own words on one line, with the place where it began if that is another line."""
    mark, begin = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:
        return ConfigError.at(Place(source), f"not YAML: {getattr(error, 'problem', error)}")
    lines = text.splitlines()
    line = min(mark.line, len(lines) - 1)  # the end of the text may be behind its last newline
    place = Place(source, line + 1)
    if lines[line][mark.column :].startswith("\t"):
        return ConfigError.at(place, "not YAML: a tab: indent with spaces")
    problem, context = getattr(error, "problem", ""), getattr(error, "context", None) or ""
    message = f"not YAML: {problem} {context}".rstrip()
    if begin is not None and begin.line < line:
        message += f" that begins in line {begin.line + 1}"
    return ConfigError.at(place, message)
