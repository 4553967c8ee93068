"""The command-line options that set the configuration, one for each key."""

from __future__ import annotations

import argparse
import os
from argparse import SUPPRESS
from functools import reduce
from pathlib import Path
from typing import Any

from npu_agent.config.load import PLUGIN_DIR_VARIABLE, Effective, build, parsed_file
from npu_agent.config.schema import KEYS, Group, Key, keys_of, schema_of
from npu_agent.config.text import as_yaml
from npu_agent.config.values import ConfigError, ParsedFile, Place, Value, scalar
from npu_agent.core.vendor import VendorSpec
from npu_agent.text import shown

FILE_VARIABLE = "NPU_AGENT_CONFIG_FILE"
"""The environment variable that names the config file where no option does."""
_DEST = "config."


def add_options(
    parser: argparse.ArgumentParser,
    words: VendorSpec,
    group: str | None = None,
    *,
    hidden: bool = False,
) -> None:
    """Add `--config-file` and an option for each key; with a group, that group's options only.

    A group's options are shown without their defaults, which are those of `run`.

    Values stay text and an option that is not given leaves no trace in the namespace, so the same
    options may be added to a command and to its parent. `args.config_file` is a Path or absent.
    Options that are hidden are not in the help, but for `--config-file`.
    """
    if group is None:
        parser.add_argument(
            "--config-file",
            metavar="FILE",
            type=Path,
            default=SUPPRESS,
            help="Read the configuration from this YAML file; not together with an option for "
            f"one of its keys (default: ${FILE_VARIABLE}).",
        )
    schema = schema_of(words)
    sections: dict[str, argparse._ArgumentGroup] = {}
    for key in keys_of(schema):
        if group not in (None, key.group):
            continue
        if key.group not in sections:
            of: Any = reduce(getattr, key.attributes[:-1], schema.default)
            what = of.ABOUT if key.group and not hidden else ""
            sections[key.group] = parser.add_argument_group(key.group or "configuration", what)
        default = "" if group or key.default in (None, ()) else f" (default: {_default(key)})"
        sections[key.group].add_argument(
            key.option,
            metavar=_placeholder(key),
            dest=_DEST + key.name,
            default=SUPPRESS,
            help=SUPPRESS if hidden else (key.description + default).replace("%", "%%"),
        )


def _placeholder(key: Key) -> str:
    placeholder = key.of.cls.AS_OPTION[0] if isinstance(key.of, Group) else key.of.placeholder
    placeholder = placeholder or key.attributes[-1].rpartition("_")[2].upper()
    return f"{placeholder},..." if key.many else placeholder


def file_of(args: argparse.Namespace) -> Path | None:
    """Returns the config file: of `--config-file`, else of the environment."""
    given: Path | None = getattr(args, "config_file", None)
    named = os.environ.get(FILE_VARIABLE)
    return given or (Path(named) if named else None)


def from_args(args: argparse.Namespace, words: VendorSpec, *, strict: bool = False) -> Effective:
    """Reads the configuration of a command line, parsed by a parser with `add_options`.

    Options win over a file that the environment names, or are refused (`strict`).

    Raises:
        ConfigError: options together with `--config-file`, a bad value, or a bad file.
    """
    given = vars(args)
    path = file_of(args)
    keys = [key for key in KEYS if _DEST + key.name in given]
    source = "--config-file" if "config_file" in given else FILE_VARIABLE
    if path and keys and (strict or source == "--config-file"):
        options = ", ".join(key.option for key in keys)
        names = ", ".join(key.name for key in keys)
        message = f"not together with {options}: set {names} in {path} instead"
        raise ConfigError.at(Place(source), message)
    written = parsed_file(path) if path else ParsedFile({}, {"": Place("command line")})
    for key in keys:
        _put(written, key, given[_DEST + key.name])
    return build(written, words)


def _put(written: ParsedFile, key: Key, text: str) -> None:
    """Sets a key as an option does, whose place is the option."""
    place = Place(key.option)
    inner: Any = written.value
    *groups, last = key.name.split(".")
    for name in groups:
        inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        return  # of a file that is refused
    value: Value = scalar(text)
    if key.many:
        parts = text.split(",") if text.strip() else []
        value = [_item(key, part.strip(), place) for part in parts]
        for number, item in enumerate(value):
            at = f"{key.name}[{number}]"
            written.places[at] = place
            written.places |= {f"{at}.{name}": place for name in item if isinstance(item, dict)}
    inner[last] = value
    written.places[key.name] = place


def _item(key: Key, text: str, place: Place) -> Value:
    if not isinstance(key.of, Group):
        return scalar(text)
    placeholder, pattern = key.of.cls.AS_OPTION
    match = pattern.fullmatch(text)
    if match is None:
        raise ConfigError.at(place, f"must be {placeholder}, not {shown(text)}")
    return {name: scalar(word) for name, word in match.groupdict().items() if word is not None}


def _default(key: Key) -> str:
    if key.name == "pluginDir":
        return f"${PLUGIN_DIR_VARIABLE}, else {key.default}"
    if isinstance(key.default, tuple):
        return ",".join(map(as_yaml, key.default))
    return key.default if isinstance(key.default, str) else as_yaml(key.default)
