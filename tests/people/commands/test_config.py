"""`npu-agent config`: check, show and schema."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from npu_agent.cli.main import main
from npu_agent.config import KEYS, Config, ConfigError, Effective, default_config, parse
from npu_agent.people.commands.config import _read, json_schema, show
from npu_agent.vendors import SPEC
from tests.config.strategies import CONFIGS, FEW

EVICTION = (
    "note: health.evict takes the components impersonation and eviction (Helm: rbac.mode: "
    "impersonation, eviction: true); without them it reaches only Pods that name a ResourceClaim"
)
LOOPBACK = "note: metrics.listen is {}: no Prometheus outside the Pod reaches it"


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        ("health: {evict: true}", [EVICTION]),
        ("metrics: {listen: '127.0.0.1:9100'}", [LOOPBACK.format("127.0.0.1:9100")]),
        ("metrics: {listen: '[::1]:9100'}", [LOOPBACK.format("[::1]:9100")]),
        ("metrics: {listen: '192.0.2.1:9100'}", []),
        ("interval: 5", []),
    ],
)
def test_a_key_that_takes_more_than_the_file_has_a_note(
    content: str, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{content}\n", encoding="utf-8")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{file}: good", *notes]


@pytest.mark.parametrize("name", ["-", "/dev/stdin", "/dev/fd/0"])
@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ("defaultPe: Fusion\n", 0, ": good"),
        ("defautPe: Fusion\n", 2, ":1: defautPe: unknown key: did you mean defaultPe?"),
        ("# " + "x" * 2**20, 2, ": larger than 256 KiB"),
    ],
)
def test_the_output_of_another_command_is_checked(
    name: str, content: str, code: int, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "npu_agent", "config", "check", name],
        input=content,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert name + words in done.stdout + done.stderr


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read by uid .*: Is a directory"):
        _read(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        _read(tmp_path / "none")


def test_show() -> None:
    text = """\
interval: 2.50
resources:
- {name: furiosa.ai/rngd, family: rngd}
health: {maxTemperature: 95}
"""
    shown = show(parse(text.encode(), "c.yaml", SPEC))
    assert shown.startswith("""\
defaultPe: Fusion                           # default
interval: 2.5                               # c.yaml:1
disabledDevices: []                         # default
pluginDir: /var/lib/kubelet/device-plugins  # default
socketName: furiosa-npu                     # default
resourceName: beta.furiosa.ai/npu           # default
resources:                                  # c.yaml:2
  - {name: furiosa.ai/rngd, family: rngd}
allocation:
  method: deviceNodes                       # default
  api: device-plugin                        # default
  nodes: []                                 # default
containers:
  deviceNodes: []                           # default
dra:
  deviceNames: identity                     # default
  partitions: false                         # default
health:
  interval: 0.5                             # default
  failures: 2                               # default
  recoveries: 3                             # default
  maxTemperature: 95                        # c.yaml:4
""")


@FEW
@given(CONFIGS)
def test_the_shown_config_is_equivalent(config: Config) -> None:
    text = show(Effective(config, {key.name: "config.yaml:1" for key in KEYS}))
    assert parse(text.encode(), "shown", SPEC).config == config


def valid(value: Any) -> bool:
    schema = json.loads(json.dumps(json_schema()))
    return bool(Draft202012Validator(schema).is_valid(value))


@FEW
@given(CONFIGS)
def test_schema_takes_every_good_configuration(config: Config) -> None:
    text = show(Effective(config, dict.fromkeys((key.name for key in KEYS), "x")))
    assert valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    "value",
    [{}, {"metrics": {"schema": 2025}}, {"metrics": {"schema": 0.8}}, {"interval": 1}],
)
def test_schema_takes(value: object) -> None:
    assert valid(value)


@pytest.mark.parametrize(
    "value",
    [
        {"intervall": 1},
        {"interval": 0},
        {"interval": "5"},
        {"health": {"maxTemperature": 20}},
        {"labels": {"sets": ["gamma"]}},
        {"labels": {"sets": ["beta", "beta"]}},
        {"metrics": {"schema": "2024"}},
        {"metrics": {"listen": "9100"}},
        {"resourceName": "kubernetes.io/npu"},
        {"disabledDevices": [{"nodeName": "a"}]},
        {"disabledDevices": [{"devName": "npu0", "x": 1}]},
    ],
)
def test_schema_refuses(value: dict[str, Any]) -> None:
    assert not valid(value)


def test_defaults_of_the_schema_are_those_of_the_program() -> None:
    properties = json_schema()["$defs"]["Config"]["properties"]
    defaults = {name: key["default"] for name, key in properties.items()}
    text = json.dumps(defaults).encode()
    assert parse(text, "defaults", SPEC).config == default_config(SPEC)
    assert (defaults["interval"], defaults["health"]["failures"]) == (10.0, 2)


def _in_a_file(name: str, value: object) -> dict[str, Any]:
    """The file in which the key of this dotted name has this value."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_schema_takes_null_where_the_loader_does() -> None:
    """Groups and lists of which all lines are commented out, as they are while somebody edits."""
    names = {key.name for key in KEYS}
    groups = {name.rpartition(".")[0] for name in names} - {""}
    taken = set()
    for name in sorted(names | groups):
        file = _in_a_file(name, None)
        try:
            parse(yaml.safe_dump(file).encode(), "x", SPEC)
        except ConfigError:
            assert not valid(file), name
        else:
            taken.add(name)
            assert valid(file), name
    assert groups | {"disabledDevices", "labels.sets", "health.maxTemperature"} <= taken
    assert "interval" not in taken
    assert parse(b"# interval: 5\n---\n", "x", SPEC).config == parse(b"", "x", SPEC).config
    assert valid(None)
