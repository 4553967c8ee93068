"""From a file's bytes, or a tree of any origin, to a valid `Config` or a `ConfigError`."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_agent import files
from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.config.kinds import Group, Items, Kind, Word
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import KEYS, Config, default_config, schema_of
from npu_agent.config.text import any_of, did_you_mean
from npu_agent.config.tree import List, Map, Node, Scalar
from npu_agent.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npu_agent.core.vocabulary import Vocabulary

MAX_BYTES = 1 << 18
"""The largest file that is read: room for 5,000 disabled cards, and loaded in about a second."""

MAX_PROBLEMS = 20
"""Problems after which the rest of a file is not read."""


@dataclass(frozen=True)
class Effective:
    """A configuration, and for each dotted key who set it.

    Attributes:
        config: valid.
        origins: of every key in `KEYS`: "default", "--interval" or "config.yaml:3".
    """

    config: Config
    origins: Mapping[str, str]


def load(path: Path, words: Vocabulary) -> Effective:
    """The configuration in this file.

    Args:
        path: errors name it as it is given here.
        words: what the vendors of cards call things, and their defaults.

    Raises:
        ConfigError: the file cannot be read, or is refused.
    """
    return parse(read(path), str(path), words)


def read(path: Path) -> bytes:
    """The content of a configuration file.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is larger than `MAX_BYTES`.
    """
    with refusals(path), os.fdopen(files.regular(path, os.O_RDONLY), "rb") as file:
        return of_allowed_size(path, file.read(MAX_BYTES + 1))


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Raises what the operating system has against the file at `path` as a ConfigError."""
    try:
        yield
    except FileNotFoundError:
        raise _refused(path, "no such file: create it, or mount the ConfigMap there") from None
    except PermissionError:
        raise _refused(path, f"may not be read by uid {os.geteuid()}: chmod a+r") from None
    except files.IrregularError as error:
        raise _refused(path, f"{error.strerror}: name a YAML file") from None
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    except ValueError:  # whose words differ between versions of Python
        raise _refused(path, "cannot be read: a NUL byte in its path") from None


def of_allowed_size(path: Path, data: bytes) -> bytes:
    """What was read of the file at `path`, unless it is larger than `MAX_BYTES`.

    Raises:
        ConfigError: it is.
    """
    if len(data) > MAX_BYTES:
        raise _refused(path, "larger than 256 KiB: this is no configuration of npu-agent")
    return data


def parse(data: bytes, source: str, words: Vocabulary) -> Effective:
    """The configuration in this YAML text; the defaults if there is nothing in it.

    Args:
        data: a file's content.
        source: what errors and origins call it.
        words: as for `load`.

    Raises:
        ConfigError: with every problem, unless it is not even YAML.
    """
    from npu_agent.config.yaml_tree import read_tree  # PyYAML: 10 ms, for nothing without a file

    tree = read_tree(data, source)
    return build(Map(Place(source), ()) if tree is None else tree, words)


def build(tree: Node, words: Vocabulary) -> Effective:
    """The configuration in this tree.

    Args:
        tree: of a file, or of command-line options.
        words: as for `load`.

    Raises:
        ConfigError: with every problem in it.
    """
    schema, defaults = schema_of(words), default_config(words)
    reader = _Reader()
    places = reader.places
    config = good = None
    with suppress(_Enough):
        config = good = reader.root(tree, schema, defaults)
        values_are_good = not reader.problems
        for keys, message in broken_rules(config, words.families):
            tops = {schema.keys[re.split(r"[.[]", key)[0]].attributes[0] for key in keys}
            good = replace(good, **{top: getattr(defaults, top) for top in tops})
            if values_are_good:
                key = next(key for key in keys if key in places)
                reader.wrong(places[key], key, message)
    if config is None or reader.problems:
        raise ConfigError(reader.problems, good)
    return Effective(config, {k.name: str(places.get(k.name, "default")) for k in KEYS})


class _Enough(Exception):  # noqa: N818
    """There are `MAX_PROBLEMS` problems."""


class _Reader:
    """Turns a tree into values, and takes note of every problem and every key's place.

    What has a problem is MISSING, and left out of the group or list that it is in.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}

    def wrong(self, place: Place, key: str, message: str) -> None:
        self.problems.append(Problem(place=place, key=key, message=message))
        if len(self.problems) == MAX_PROBLEMS:
            raise _Enough

    def root(self, tree: Node, schema: Group, defaults: Config) -> Any:
        if isinstance(tree, Map):
            return self.group(tree, schema, "")
        if not (isinstance(tree, Scalar) and tree.null):  # such as "---" alone
            # Without its words: it may be somebody else's file, such as a key or a token.
            found = "text" if isinstance(tree, Scalar) else _named(tree)
            message = f"must be keys and values (interval: 10), not {found}"
            self.wrong(tree.place, "", message)
        return defaults

    def value(self, node: Node, kind: Kind, key: str, *, optional: bool = False) -> Any:
        match kind, node:
            case _, Scalar(null=True) if not (optional and node.text):
                also = ", or null" if optional else ""
                message = f"no value: write one{also}, or leave it out"
            case _, Scalar(null=True):
                return None
            case Group(), Map():
                return self.group(node, kind, key + ".")
            case Items(), List():
                return self.list(node, kind, key)
            case _:
                value, message = _read(node, kind)
                if not message:
                    return value
        self.wrong(node.place, key, message)
        return MISSING

    def list(self, node: List, kind: Items, key: str) -> tuple[Any, ...]:
        values = []
        for index, item in enumerate(node.items):
            self.places[f"{key}[{index}]"] = item.place
            values.append(self.value(item, kind.of, f"{key}[{index}]"))
        return tuple(value for value in values if value is not MISSING)

    def group(self, node: Map, kind: Group, prefix: str) -> Any:
        seen: dict[str, Place] = {}
        values: dict[str, Any] = {key.attributes[-1]: key.default for key in kind.keys.values()}
        for name, value in node.entries:
            key = prefix + name.text
            known = kind.keys.get(name.text)
            if known is None:
                message = _unknown(name.text, kind, prefix)
                self.wrong(name.place, prefix + shown(name.text), message)
            elif name.text in seen:
                first = seen[name.text]
                self.wrong(name.place, key, f"is in line {first.line} already: keep one of the two")
            else:
                seen[name.text] = name.place
                if isinstance(value, Scalar) and value.null and not isinstance(known.kind, Word):
                    continue  # a group or list whose lines are all commented out
                self.places[key] = name.place
                read = self.value(value, known.kind, key, optional=known.optional)
                if read is not MISSING:
                    values[known.attributes[-1]] = read
        for key, known in kind.keys.items():
            if known.default is MISSING and key not in seen:
                self.wrong(node.place, prefix[:-1], f"{key} is missing")
        return MISSING if MISSING in values.values() else kind.cls(**values)


def _read(node: Node, kind: Kind) -> tuple[object, str]:
    """The value that stands there as one word, or what is wrong with it."""
    found = _named(node)
    match kind, node:
        case Word(quoted=False), Scalar(plain=False):
            found = "text: take the quotes away"
        case Word(), Scalar():
            try:
                value = kind.read(node.text)
            except ValueError as error:
                return None, str(error)
            if value is not None:
                return value, ""
            found += did_you_mean(node.text, kind.words)
        case Items(of=Word()), Scalar():
            found += f": write [{found}]"
    return None, f"must be {kind.must}, not {found}"


def _named(node: Node) -> str:
    """What stands there, for an error."""
    if isinstance(node, Scalar):
        return shown(node.text)
    return "a list" if isinstance(node, List) else "a group of keys"


def _unknown(name: str, group: Group, prefix: str) -> str:
    """The message for a key that does not exist; names the key that was likely meant."""

    def bare(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    meant = [prefix + each for each in group.keys if bare(each) == bare(name)]
    if not meant and "[" not in prefix:
        # In another group, or named like its option.
        words = [(key.name, key.attributes[-1]) for key in KEYS]
        meant = [each[0] for each in words if bare(name) in map(bare, each)]
    if meant:
        return f"unknown key: did you mean {any_of(meant)}?"
    hint = did_you_mean(name, group.keys, prefix) or f": there are {', '.join(group.keys)}"
    return f"unknown key{hint}"


def _refused(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(place=Place(str(path)), message=message)])
