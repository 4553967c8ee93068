"""The command-line options that set the configuration, one for each key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.config.kinds import Group, Items, Kind
from npu_agent.config.load import Effective, build, load
from npu_agent.config.schema import KEYS, Key, group_of, keys_of, schema_of
from npu_agent.config.text import as_yaml
from npu_agent.config.tree import List, Map, Node, Scalar
from npu_agent.text import shown

if TYPE_CHECKING:
    import argparse

    from npu_agent.core.vocabulary import Vocabulary

_DEST = "config."


def add_options(
    parser: argparse.ArgumentParser,
    words: Vocabulary,
    group: str | None = None,
    *,
    hidden: bool = False,
) -> None:
    """Add `--config-file` and an option for each key; with a group, that group's options only.

    Values stay text and an option that is not given leaves no trace in the namespace, so the same
    options may be added to a command and to its parent. `args.config_file` is a Path or absent.
    Options that are hidden are not in the help, but for `--config-file`.
    """
    from argparse import SUPPRESS  # not for those who only read files

    if group is None:
        parser.add_argument(
            "--config-file",
            metavar="FILE",
            type=Path,
            default=SUPPRESS,
            help="Read the configuration from this YAML file, and follow it while running; "
            "not together with an option for one of its keys.",
        )
    schema = schema_of(words)
    sections: dict[str, argparse._ArgumentGroup] = {}
    for key in keys_of(schema):
        if group not in (None, key.group):
            continue
        heading = key.group or "configuration"
        if heading not in sections:
            about = group_of(schema, key.group).about if key.group and not hidden else None
            sections[heading] = parser.add_argument_group(heading, about)
        default = "" if key.default in (None, ()) else f" (default: {_default(key)})"
        sections[heading].add_argument(
            key.option,
            metavar=key.kind.placeholder or key.attributes[-1].rpartition("_")[2].upper(),
            dest=_DEST + key.name,
            default=SUPPRESS,
            help=SUPPRESS if hidden else (key.description + default).replace("%", "%%"),
        )


def from_args(args: argparse.Namespace, words: Vocabulary) -> Effective:
    """The configuration that a command line asks for.

    Args:
        args: parsed by a parser with `add_options`.
        words: what the vendors of cards call things, and their defaults.

    Raises:
        ConfigError: options beside `--config-file`, a bad value, or a bad file.
    """
    given = vars(args)
    keys = [key for key in KEYS if _DEST + key.name in given]
    path: Path | None = given.get("config_file")
    if path is None:
        return build(_tree([(key, given[_DEST + key.name]) for key in keys]), words)
    if keys:
        options, names = (
            ", ".join(words) for words in zip(*((k.option, k.name) for k in keys), strict=True)
        )
        message = f"not together with {options}: set {names} in {path} instead"
        raise ConfigError([Problem(place=Place("--config-file"), message=message)])
    return load(path, words)


def _tree(given: list[tuple[Key, str]]) -> Map:
    """The options as a file would say it, each at the place that is the option."""
    return _group([(key.name.split("."), key, text) for key, text in given])


def _group(given: list[tuple[list[str], Key, str]]) -> Map:
    """A group of keys, each with the way to it from here."""
    nowhere = Place("command line")
    entries: list[tuple[Scalar, Node]] = []
    inner: dict[str, list[tuple[list[str], Key, str]]] = {}
    for (name, *rest), key, text in given:
        if rest:
            inner.setdefault(name, []).append((rest, key, text))
        else:
            place = Place(key.option)
            entries.append((Scalar(place, name), _node(key.kind, text, place)))
    entries += [(Scalar(nowhere, name), _group(each)) for name, each in inner.items()]
    return Map(nowhere, tuple(entries))


def _node(kind: Kind, text: str, place: Place) -> Node:
    if isinstance(kind, Items):
        parts = text.split(",") if text.strip() else []
        return List(place, tuple(_node(kind.of, part.strip(), place) for part in parts))
    if not isinstance(kind, Group):
        return Scalar(place, text)
    found = kind.pattern.fullmatch(text) if kind.pattern else None
    if found is None:
        message = f"must be {kind.placeholder}, not {shown(text)}"
        raise ConfigError([Problem(place=place, message=message)])
    values = found.groupdict().items()
    return Map(
        place, tuple((Scalar(place, k), Scalar(place, v)) for k, v in values if v is not None)
    )


def _default(key: Key) -> str:
    if isinstance(key.default, tuple):
        return ",".join(map(as_yaml, key.default))
    return key.default if isinstance(key.default, str) else as_yaml(key.default)
