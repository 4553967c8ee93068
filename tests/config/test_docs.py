"""docs/configuration.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.inspect import FloatType, IntType

from npu_agent.config import KEYS, SOCKET_PATH_MAX, SOCKET_SUFFIX, ConfigError, Key, parse
from npu_agent.config.text import as_yaml

from .families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def test_table_of_keys() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| `(.+?)` \| (\w+) \| .+ \|$", PAGE, re.MULTILINE)
    assert rows == [
        (key.name, key.option, as_yaml(key.default), "live" if key.live else "restart")
        for key in KEYS
    ]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_ranges(key: Key) -> None:
    kind = key.kind
    if isinstance(kind, IntType | FloatType):
        [row] = re.findall(rf"^\| `{key.name}` .+$", PAGE, re.MULTILINE)
        assert f"; {kind.ge:g} to {kind.le:g}" in row


def test_examples_are_good() -> None:
    examples = re.findall(r"^```yaml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for text in examples:
        parse(text.encode(), "example", FAMILIES)


def test_errors_are_real() -> None:
    text = """\
# line 1
interval: 0
default_pe: Single
listen: :9100
health:
  interval: 500ms
  failures: 010
metrics:
  podLabels: yes
  podLabels: no

resources:
- {name: rngd, family: rngd}
"""
    with pytest.raises(ConfigError) as caught:
        parse(text.encode(), "config.yaml", FAMILIES)
    assert f"```\n{caught.value}\n```" in PAGE


def test_socket_path() -> None:
    assert f"Linux takes {SOCKET_PATH_MAX} bytes" in PAGE
    assert f"adds up to {SOCKET_SUFFIX}" in PAGE
    assert f"may have {SOCKET_PATH_MAX - SOCKET_SUFFIX - 1} bytes together" in PAGE
