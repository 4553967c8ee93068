"""Turns a file's bytes, or `ParsedFile` values, into a valid `Config` or a `ConfigError`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any

from npu_agent import files
from npu_agent.config.errors import ConfigError, Place, Problem
from npu_agent.config.gone import gone
from npu_agent.config.kinds import ValueKind
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import KEYS, Config, Group, Key, default_config, schema_of
from npu_agent.config.text import any_of, bare, did_you_mean
from npu_agent.config.values import Null, ParsedFile, Value, parsed_yaml
from npu_agent.core.vendor_spec import VendorSpec
from npu_agent.text import shown

PLUGIN_DIR_VARIABLE = "NPU_AGENT_PLUGIN_DIR"
"""The environment variable for the default of pluginDir."""
MAX_BYTES = 1 << 18
"""The largest file that is read: room for 5,000 disabled cards, and loaded in about a second."""


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
    return _parsed(data, str(path))


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
    except PermissionError:
        message = f"may not be read by uid {os.geteuid()}: chmod a+r"
    except files.IrregularError as error:
        message = f"{error.strerror}: name a YAML file"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except ValueError:  # whose words differ between versions of Python
        message = "cannot be read: a NUL byte in its path"
    else:
        return
    raise ConfigError.at(Place(str(path)), message)


def parse(data: bytes, source: str, words: VendorSpec) -> Effective:
    """Parses a file's content; `source` is what errors call it.

    Raises:
        ConfigError: with every problem, unless it is not YAML, or larger than `MAX_BYTES`.
    """
    return build(_parsed(data, source), words)


def _parsed(data: bytes, source: str) -> ParsedFile:
    if len(data) > MAX_BYTES:
        message = "larger than 256 KiB: this is not a configuration of npu-agent"
        raise ConfigError.at(Place(source), message)
    return parsed_yaml(data, source)


def build(written: ParsedFile, words: VendorSpec) -> Effective:
    """Builds the configuration; raises a ConfigError with every problem in it."""
    _add_plugin_dir(written)
    schema, defaults = schema_of(words), default_config(words)
    reader = _Reader(written)
    config = good = reader.root(schema, defaults)
    bad = {_top(problem.key) for problem in reader.problems}
    for message, keys in broken_rules(config, words.families):
        tops = {schema.keys[_top(key)].attributes[0] for key in keys}
        good = replace(good, **{top: getattr(defaults, top) for top in tops})
        if bad.isdisjoint(map(_top, keys)):
            reader.wrong(next(key for key in keys if key in written.places), message)
    if reader.problems:
        raise ConfigError(reader.problems, good)
    return Effective(config, {k.name: str(written.places.get(k.name, "default")) for k in KEYS})


def _top(key: str) -> str:
    """The first part of a dotted key: ``resources`` of ``resources[0].family``."""
    return re.split(r"[.[]", key)[0]


def _add_plugin_dir(written: ParsedFile) -> None:
    """Takes the kubelet's directory from the environment where nothing names it."""
    if not (directory := os.environ.get(PLUGIN_DIR_VARIABLE)):
        return
    if isinstance(written.value, Null):
        written.value = {}
    if isinstance(written.value, dict) and "pluginDir" not in written.value:
        written.value["pluginDir"] = directory
        written.places["pluginDir"] = Place(PLUGIN_DIR_VARIABLE)


class _Reader:
    """Turns what was written into values, and collects every problem.

    A value with a problem is MISSING, and left out of its group or list.
    """

    def __init__(self, written: ParsedFile) -> None:
        self.written = written
        self.problems = written.problems

    def wrong(self, path: str, message: str, key: str | None = None) -> None:
        place, key = self.written.places[path], path if key is None else key
        self.problems.append(Problem(place=place, key=key, message=message))

    def root(self, schema: Group, defaults: Config) -> Any:
        root = self.written.value
        if isinstance(root, dict) and {"apiVersion", "kind"} <= root.keys():
            what = f"this is an object of Kubernetes ({_named(root['kind'])})"
            self.wrong("kind", f"{what}: pass the text of its data, config.yaml")
            return defaults
        if isinstance(root, dict):
            return self.group(root, schema, "")
        if not isinstance(root, Null):  # such as "---" alone
            # Without its words: it may be another file, such as a key or a token.
            what = "a list" if isinstance(root, list) else "text"
            self.wrong("", f"must be keys and values (interval: 10), not {what}")
        return defaults

    def group(self, mapping: dict[str, Value], group: Group, path: str) -> Any:
        prefix = f"{path}." if path else ""
        values = {key.attributes[-1]: key.default for key in group.keys.values()}
        for name, key in group.keys.items():
            if key.default is MISSING and name not in mapping:
                self.wrong(path, f"{name} is missing")
        for name, value in mapping.items():
            at, expected = prefix + name, group.keys.get(name)
            if expected is None:
                self.wrong(at, _unknown(name, group, prefix), prefix + shown(name))
            elif isinstance(value, Null) and (expected.many or isinstance(expected.of, Group)):
                # A group or list whose lines are all commented out: it has the default.
                del self.written.places[at]
            elif (read := self.value(value, expected, at)) is not MISSING:
                values[expected.attributes[-1]] = read
        return MISSING if MISSING in values.values() else group.cls(**values)

    def value(self, value: Value, key: Key, path: str) -> Any:
        if not key.many:
            return self.one(value, key.of, path, optional=key.optional)
        if not isinstance(value, list):
            hint = f": write [{shown(value)}]" if isinstance(value, str) else ""
            hint = "" if isinstance(key.of, Group) else hint
            self.wrong(path, f"must be a list, not {_named(value)}{hint}")
            return MISSING
        values = [self.one(item, key.of, f"{path}[{n}]") for n, item in enumerate(value)]
        return tuple(value for value in values if value is not MISSING)

    def one(self, raw: Value, of: ValueKind | Group, path: str, *, optional: bool = False) -> Any:
        if isinstance(raw, Null):
            if optional and raw:
                return None
            also = ", or null" if optional else ""
            self.wrong(path, f"no value: write one{also}, or leave it out")
            return MISSING
        if isinstance(of, Group) and isinstance(raw, dict):
            return self.group(raw, of, path)
        hint = ""
        if isinstance(of, ValueKind) and isinstance(raw, str):
            try:
                if (value := of.read(raw)) is not None:
                    return value
            except ValueError as error:
                self.wrong(path, str(error))
                return MISSING
            hint = did_you_mean(raw, of.words)
        self.wrong(path, f"must be {of.must}, not {_named(raw)}{hint}")
        return MISSING


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
