"""Turns a file's bytes, or `ParsedFile` values, into a valid `Config` or a `ConfigError`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from npu_agent import files
from npu_agent.config.kinds import ValueKind
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import KEYS, Config, Group, Key, schema_of
from npu_agent.config.text import any_of, bare, did_you_mean, gone
from npu_agent.config.values import (
    MAX_BYTES,
    ConfigError,
    Null,
    ParsedFile,
    Place,
    Value,
    parsed_yaml,
)
from npu_agent.core.vendor import VendorSpec
from npu_agent.text import shown

PLUGIN_DIR_VARIABLE = "NPU_AGENT_PLUGIN_DIR"
"""The environment variable for the default of pluginDir."""


@dataclass(frozen=True)
class Effective:
    """A valid configuration, and who set each key."""

    config: Config
    origins: Mapping[str, str]
    """Of every key in `KEYS`: "default", "--interval" or "config.yaml:3"."""


def load(path: Path, words: VendorSpec) -> Effective:
    """Reads a configuration file; raises a ConfigError if that fails, or it is refused."""
    return build(parsed_file(path), words)


def parsed_file(path: Path) -> ParsedFile:
    """Reads a configuration file, as it is written; raises a ConfigError if that fails."""
    with refusals(path):
        data = content(path)
    return parsed_yaml(data, str(path))


def content(path: Path) -> bytes:
    """The content of a file, as far as `parse` has to see it; may block. Raises as `files.read`."""
    with os.fdopen(files.regular(path, os.O_RDONLY), "rb") as file:
        return file.read(MAX_BYTES + 1)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Raises an OSError about the file at `path` as a ConfigError."""
    try:
        yield
    except FileNotFoundError:
        message = "no such file: create it, or mount the ConfigMap there"
        raise ConfigError.at(Place(str(path)), message) from None
    except OSError as error:
        message = f"cannot be read by uid {os.geteuid()}: {error.strerror}"
        raise ConfigError.at(Place(str(path)), message) from error


def parse(data: bytes, source: str, words: VendorSpec) -> Effective:
    """Parses a file's content; `source` is what errors call it.

    Raises:
        ConfigError: with every problem, unless it is not YAML, or larger than `MAX_BYTES`.
    """
    return build(parsed_yaml(data, source), words)


def build(written: ParsedFile, words: VendorSpec) -> Effective:
    """Builds the configuration; raises a ConfigError with every problem in it.

    Rules between keys are checked when each key is good by itself.
    """
    _add_plugin_dir(written)
    config = _root(written, schema_of(words))
    if not written.problems:
        for message, keys in broken_rules(config, words.families):
            written.wrong(next(key for key in keys if key in written.places), message)
    if written.problems:
        raise ConfigError(written.problems)
    return Effective(config, {k.name: str(written.places.get(k.name, "default")) for k in KEYS})


def _add_plugin_dir(written: ParsedFile) -> None:
    """Takes the kubelet's directory from the environment where nothing names it."""
    if not (directory := os.environ.get(PLUGIN_DIR_VARIABLE)):
        return
    if isinstance(written.value, Null):
        written.value = {}
    if isinstance(written.value, dict) and "pluginDir" not in written.value:
        written.value["pluginDir"] = directory
        written.places["pluginDir"] = Place(PLUGIN_DIR_VARIABLE)


# What follows adds every problem to `written`; the value of what has one is of no use.


def _root(written: ParsedFile, schema: Group) -> Any:
    root = written.value
    if isinstance(root, dict) and {"apiVersion", "kind"} <= root.keys():
        what = f"this is an object of Kubernetes ({_named(root['kind'])})"
        written.wrong("kind", f"{what}: pass the text of its data, config.yaml")
        return schema.default
    if isinstance(root, dict):
        return _group(written, root, schema, "")
    if not isinstance(root, Null):  # such as "---" alone
        # Without its words: it may be another file, such as a key or a token.
        what = "a list" if isinstance(root, list) else "text"
        written.wrong("", f"must be keys and values (interval: 10), not {what}")
    return schema.default


def _group(written: ParsedFile, mapping: dict[str, Value], group: Group, path: str) -> Any:
    prefix = f"{path}." if path else ""
    values = {key.attributes[-1]: key.default for key in group.keys.values()}
    for name, key in group.keys.items():
        if key.default is MISSING and name not in mapping:
            written.wrong(path, f"{name} is missing")
    for name, value in mapping.items():
        at = prefix + name
        expected = group.keys.get(name)
        if expected is None:
            written.wrong(at, _unknown(name, group, prefix))
        elif isinstance(value, Null) and (expected.many or isinstance(expected.of, Group)):
            # A group or list whose lines are all commented out: it has the default.
            del written.places[at]
        elif expected.many:
            values[expected.attributes[-1]] = _items(written, value, expected, at)
        else:
            values[expected.attributes[-1]] = _value(written, value, expected, at)
    return group.cls(**values)


def _items(written: ParsedFile, value: Value, key: Key, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        written.wrong(path, f"must be a list like [a, b], not {_named(value)}")
        return ()
    return tuple(_value(written, item, key, f"{path}[{n}]") for n, item in enumerate(value))


def _value(written: ParsedFile, value: Value, key: Key, path: str) -> Any:
    of = key.of
    hint = ""

    if isinstance(value, Null):
        if not (key.optional and value):
            also = ", or null" if key.optional else ""
            written.wrong(path, f"no value: write one{also}, or leave it out")
        return None
    if isinstance(of, Group) and isinstance(value, dict):
        return _group(written, value, of, path)
    if isinstance(of, ValueKind) and isinstance(value, str):
        if (good := of.read(value)) is not None:
            return good
        hint = did_you_mean(value, of.words)
    written.wrong(path, f"must be {of.must}, not {_named(value)}{hint}")
    return None


def _named(value: Value) -> str:
    if isinstance(value, str):
        return shown(value)
    return "a list" if isinstance(value, list) else "a group of keys"


def _unknown(name: str, group: Group, prefix: str) -> str:
    """The message for an unknown key; names the key that was likely meant."""
    meant = [prefix + sibling for sibling in group.keys if bare(sibling) == bare(name)]
    if not meant and "[" not in prefix:
        # In another group, or named like its option.
        words = [(key.name, key.attributes[-1]) for key in KEYS]
        meant = [names[0] for names in words if bare(name) in map(bare, names)]
    if meant:
        return f"unknown key: did you mean {any_of(meant)}?"
    if removed := gone(prefix + name):
        return removed
    hint = did_you_mean(name, group.keys, prefix) or f": there are {', '.join(group.keys)}"
    return f"unknown key{hint}"
