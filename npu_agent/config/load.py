"""From a file's bytes, or a tree of any origin, to a valid `Config` or a `ConfigError`."""

from __future__ import annotations

import math
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec import inspect as mi

from npu_agent import files
from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.config.rules import any_of, broken_rules, did_you_mean
from npu_agent.config.schema import KEYS, Config, Schema, default_config, plain, schema_of
from npu_agent.config.tree import List, Map, Node, Scalar
from npu_agent.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npu_agent.core.vocabulary import Vocabulary

MAX_BYTES = 1 << 18
"""The largest file that is read: room for 5,000 disabled cards, and loaded in about a second."""

MAX_PROBLEMS = 20
"""Problems after which the rest of a file is not read."""

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?")
_LEADING_ZEROS = re.compile(r"([-+]?)0+(?=[0-9])")


class Effective(msgspec.Struct, frozen=True):
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
    reader = _Reader(schema, defaults)
    places = reader.places
    names = {field.encode_name: field.name for field in schema.root.fields}
    config = good = None
    with suppress(_Enough):
        config = good = reader.root(tree)
        values_are_good = not reader.problems
        for keys, message in broken_rules(config, words.families):
            tops = {names[re.split(r"[.[]", key)[0]] for key in keys}
            good = msgspec.structs.replace(good, **{top: getattr(defaults, top) for top in tops})
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

    What has a problem is UNSET, and left out of the group or list that it is in.
    """

    def __init__(self, schema: Schema, defaults: Config) -> None:
        self.schema = schema
        self.defaults = defaults
        self.problems: list[Problem] = []
        self.places: dict[str, Place] = {}

    def wrong(self, place: Place, key: str, message: str) -> None:
        self.problems.append(Problem(place=place, key=key, message=message))
        if len(self.problems) == MAX_PROBLEMS:
            raise _Enough

    def root(self, tree: Node) -> Any:
        if isinstance(tree, Scalar) and tree.null:  # such as "---" alone
            return self.defaults
        if not isinstance(tree, Map):
            self.wrong(
                tree.place, "", f"must be keys and values (interval: 10), not {_named(tree)}"
            )
            return self.defaults
        return self.group(tree, self.schema.root, "")

    def value(self, node: Node, kind: mi.Type, key: str) -> Any:
        optional = isinstance(kind, mi.Metadata) and isinstance(kind.type, mi.UnionType)
        kind, notes = plain(kind)
        value, message = None, ""
        match kind, node:
            case _, Scalar(null=True):
                if not optional or not node.text:
                    also = ", or null" if optional else ""
                    message = f"no value: write one{also}, or leave it out"
            case mi.StructType(), Map():
                return self.group(node, kind, key + ".")
            case mi.VarTupleType(), List():
                return self.list(node, kind, key)
            case mi.StructType(), _:
                names = ", ".join(field.encode_name for field in kind.fields)
                message = f"must be a group of keys ({names}), not {_named(node)}"
            case mi.VarTupleType(), _:
                message = f"must be a list, not {_named(node)}"
                if isinstance(node, Scalar) and not isinstance(kind.item_type, mi.StructType):
                    message += f": write [{shown(node.text)}]"
            case _:
                value, message = _scalar(node, kind, notes)
        if message:
            self.wrong(node.place, key, message)
            return UNSET
        return value

    def list(self, node: List, kind: mi.VarTupleType, key: str) -> tuple[Any, ...]:
        values = []
        for index, item in enumerate(node.items):
            self.places[f"{key}[{index}]"] = item.place
            values.append(self.value(item, kind.item_type, f"{key}[{index}]"))
        return tuple(value for value in values if value is not UNSET)

    def group(self, node: Map, kind: mi.StructType, prefix: str) -> Any:
        fields = {field.encode_name: field for field in kind.fields}
        seen: dict[str, Place] = {}
        values: dict[str, Any] = {}
        for name, value in node.entries:
            key = prefix + name.text
            if name.text not in fields:
                self.wrong(
                    name.place, prefix + shown(name.text), _unknown(name.text, fields, prefix)
                )
            elif name.text in seen:
                first = seen[name.text]
                self.wrong(name.place, key, f"is in line {first.line} already: keep one of the two")
            else:
                seen[name.text] = name.place
                field = fields[name.text]
                container = isinstance(plain(field.type)[0], mi.StructType | mi.VarTupleType)
                if container and isinstance(value, Scalar) and value.null:
                    continue  # a group or list whose lines are all commented out
                self.places[key] = name.place
                if (read := self.value(value, field.type, key)) is not UNSET:
                    values[field.name] = read
        for field in kind.fields:
            if field.required and field.encode_name not in seen:
                self.wrong(node.place, prefix[:-1], f"{field.encode_name} is missing")
            elif not field.required:
                values.setdefault(field.name, field.default)
        complete = all(field.name in values for field in kind.fields if field.required)
        return kind.cls(**values) if complete else UNSET


def _scalar(node: Node, kind: mi.Type, notes: Mapping[str, Any]) -> tuple[Any, str]:
    """The value of one scalar, or what is wrong with it."""
    match kind:
        case mi.LiteralType(values):
            words = [str(value) for value in values]
            must = any_of(words)
        case mi.StrType():
            must = notes["must"]
        case mi.BoolType():
            must = "true or false"
        case _:
            must = "a whole number" if isinstance(kind, mi.IntType) else "a number"
            must += f" ({notes['unit']})" if "unit" in notes else ""
    message = f"must be {must}, not {_named(node)}"
    if not isinstance(node, Scalar):
        return None, message
    text = node.text
    match kind:
        case mi.LiteralType():
            return (text, "") if text in words else (None, message + did_you_mean(text, words))
        case mi.StrType(max_length=most, pattern=pattern):
            # The length first: it bounds what the pattern may cost. All of the text must match:
            # Python's "$" would let a last newline pass.
            fits = len(text) <= (most or MAX_BYTES) and re.fullmatch(pattern or ".*", text)
            return (text, "") if fits else (None, message)
        case _ if not node.plain:
            return None, f"must be {must}, not text: take the quotes away"
        case mi.BoolType():
            value = {"true": True, "false": False}.get(text.lower())
            known = text in {text.lower(), text.title(), text.upper()}
            return (value, "") if value is not None and known else (None, message)
        case mi.IntType() | mi.FloatType():
            return _number(text, kind, notes, message)
        case _:
            raise AssertionError(kind)  # a type in the schema that nobody taught this function


def _number(
    text: str, kind: mi.IntType | mi.FloatType, notes: Mapping[str, Any], message: str
) -> tuple[Any, str]:
    if not (_INTEGER if isinstance(kind, mi.IntType) else _NUMBER).fullmatch(text):
        return None, message
    if _LEADING_ZEROS.match(text):
        better = _LEADING_ZEROS.sub(r"\1", text)
        return None, f"{text}: some read a leading zero as octal: write {better}"
    value = int(text) if isinstance(kind, mi.IntType) else float(text)
    low, high = kind.ge or 0, kind.le or math.inf
    if not low <= value <= high:
        unit = f" ({notes['unit']})" if "unit" in notes else ""
        return None, f"{text} is out of range: must be {low:g} to {high:g}{unit}"
    return value, ""


def _named(node: Node) -> str:
    """What stands there, for an error."""
    if isinstance(node, Scalar):
        return shown(node.text)
    return "a list" if isinstance(node, List) else "a group of keys"


def _unknown(name: str, fields: Mapping[str, mi.Field], prefix: str) -> str:
    """The message for a key that does not exist; names the key that was likely meant."""

    def bare(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    meant = [prefix + each for each in fields if bare(each) == bare(name)]
    if not meant and "[" not in prefix:
        # In another group, or named like its option.
        words = [(key.name, key.attributes[-1]) for key in KEYS]
        meant = [each[0] for each in words if bare(name) in map(bare, each)]
    if meant:
        return f"unknown key: did you mean {any_of(meant)}?"
    return f"unknown key{did_you_mean(name, fields, prefix) or ': there are ' + ', '.join(fields)}"


def _refused(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(place=Place(str(path)), message=message)])
