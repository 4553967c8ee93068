from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given

from npu_agent.config import (
    KEYS,
    Config,
    ConfigError,
    Effective,
    add_options,
    default_config,
    from_args,
    parse,
)
from npu_agent.config.schema import (
    DisabledDevice,
    HealthConfig,
    NodeApi,
    ResourceSpec,
    keys_of,
    schema_of,
)
from npu_agent.config.text import as_yaml
from npu_agent.vendors import SPEC

from .strategies import CONFIGS, FEW

if TYPE_CHECKING:
    from pathlib import Path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_options(made, SPEC)
    return made


def effective_of(*args: str) -> Effective:
    return from_args(parser().parse_args(args), SPEC)


def error_of(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        effective_of(*args)
    return str(caught.value)


def test_values_and_origins() -> None:
    effective = effective_of("--interval", "5", "--health-failures=4", "--disabled-devices", "a, b")
    assert effective.config == replace(
        default_config(SPEC),
        interval=5.0,
        health=HealthConfig(failures=4),
        disabled_devices=(DisabledDevice(dev_name="a"), DisabledDevice(dev_name="b")),
    )
    assert {key: origin for key, origin in effective.origins.items() if origin != "default"} == {
        "interval": "--interval",
        "health.failures": "--health-failures",
        "disabledDevices": "--disabled-devices",
    }


def test_empty_lists() -> None:
    config = effective_of("--labels-sets", "", "--labels-output", "none", "--resources=").config
    assert config.labels.sets == ()
    assert config.resources == ()


def as_option(value: object) -> str:
    match value:
        case NodeApi():
            return f"{value.node_name}={value.api}"
        case DisabledDevice():
            return value.dev_name
        case ResourceSpec():
            return f"{value.name}={value.family}:{value.cores_per_device}"
        case tuple():
            return ",".join(map(as_option, value))
        case str():
            return value
    return as_yaml(value)


@FEW
@given(CONFIGS)
def test_options_can_set_all_that_a_file_can(config: Config) -> None:
    # What is null in YAML is null in an option; a card of such a name needs a file, and quotes.
    assume(not {"null", "Null", "NULL", "~"} & {each.dev_name for each in config.disabled_devices})
    texts = {key: as_option(key.value(config)) for key in KEYS}
    effective = effective_of(*(f"{key.option}={texts[key]}" for key in KEYS))
    here = tuple(DisabledDevice(dev_name=each.dev_name) for each in config.disabled_devices)
    assert effective.config == replace(config, disabled_devices=here)


ERRORS = [
    (["--socket-name", ""], "--socket-name: no value: write one, or leave it out"),
    (
        ["--labels-sets", "beta,beta"],
        "--labels-sets: beta is there twice: change one of them",
    ),
    (["--disabled-devices", "a,,b"], '--disabled-devices: must be DEVICE, not ""'),
    (
        ["--metrics-tls-cert-file", "/c"],
        "--metrics-tls-cert-file: needs TLS: give both metrics.tls.certFile and keyFile",
    ),
    (["--resources", "rngd:4"], "--resources: must be NAME=FAMILY[:CORES], not rngd:4"),
    (
        ["--log-level", "loud", "--interval", "x"],
        """\
--interval: must be a number (seconds), 0.1 to 3600, not x
--log-level: must be debug, error, info or warning, not loud""",
    ),
    (
        ["--plugin-dir", "\udcff"],
        '--plugin-dir: must be an absolute path, not "\\udcff"',
    ),
    (
        ["--config-file", "x", "--events", "1", "--interval", "1"],
        "--config-file: not together with --interval, --events: set interval, events in x instead",
    ),
    (
        ["--config-file", "/nowhere.yaml"],
        "/nowhere.yaml: no such file: create it, or mount the ConfigMap there",
    ),
]


@pytest.mark.parametrize(("args", "message"), ERRORS, ids=[" ".join(args) for args, _ in ERRORS])
def test_error(args: list[str], message: str) -> None:
    assert error_of(*args) == message


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("interval: 5\n", encoding="utf-8")
    assert effective_of("--config-file", str(path)) == parse(b"interval: 5\n", str(path), SPEC)


def test_options_before_and_after_a_command_join() -> None:
    made = argparse.ArgumentParser()
    add_options(made, SPEC, "log")
    add_options(made.add_subparsers().add_parser("run"), SPEC)
    args = made.parse_args(["--log-level", "debug", "run", "--interval", "3"])
    effective = from_args(args, SPEC)
    assert effective.config.log.level == "debug"
    assert effective.config.interval == 3.0


def test_help_says_meaning_and_default() -> None:
    text = " ".join(parser().format_help().split())
    for key in keys_of(schema_of(SPEC)):
        assert f"{key.option} " in text
        assert key.description in text
    assert "--interval SECONDS Seconds between two readings" in text
    assert "health: When a card is taken out of service and brought back." in text
    assert "--default-pe {Fusion,Single} Size of a device" in text
    assert "(default: beta)" in text
    assert "(default: true)" in text


def test_a_file_of_the_environment_counts_as_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "config.yaml", tmp_path / "other.yaml"
    file.write_text("interval: 5\nhealth: {failures: 4}\n", encoding="utf-8")
    other.write_text("interval: 6\n", encoding="utf-8")
    monkeypatch.setenv("NPU_AGENT_CONFIG_FILE", str(file))
    found = effective_of("--health-recoveries=9", "--interval=7")
    assert (found.config.interval, found.config.health.failures) == (7.0, 4)
    assert found.config.health.recoveries == 9
    assert [found.origins[key] for key in ("interval", "health.failures")] == [
        "--interval",
        f"{file}:2",
    ]
    assert effective_of("--config-file", str(other)).config.interval == 6.0
    # The agent itself takes one or the other.
    args = parser().parse_args(["--interval=7"])
    with pytest.raises(ConfigError) as refused:
        from_args(args, SPEC, strict=True)
    assert str(refused.value) == (
        f"NPU_AGENT_CONFIG_FILE: not together with --interval: set interval in {file} instead"
    )
    assert from_args(parser().parse_args([]), SPEC, strict=True).config.interval == 5.0
    # What is wrong in the file is named, whatever options there are.
    file.write_text("health: bad\n", encoding="utf-8")
    assert f"{file}:1: health: must be" in error_of("--health-recoveries=9")
    monkeypatch.setenv("NPU_AGENT_CONFIG_FILE", "")
    assert effective_of().config == default_config(SPEC)


def test_the_plugin_directory_of_the_environment_is_the_keys_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPU_AGENT_PLUGIN_DIR", "/k/device-plugins")
    for content, expected, origin in (
        (b"", "/k/device-plugins", "NPU_AGENT_PLUGIN_DIR"),
        (b"interval: 5", "/k/device-plugins", "NPU_AGENT_PLUGIN_DIR"),
        (b"pluginDir: /own", "/own", "f:1"),
    ):
        found = parse(content, "f", SPEC)
        assert (found.config.plugin_dir, found.origins["pluginDir"]) == (expected, origin)
    assert effective_of("--plugin-dir=/own").config.plugin_dir == "/own"
    monkeypatch.setenv("NPU_AGENT_PLUGIN_DIR", "relative")
    assert error_of() == ("NPU_AGENT_PLUGIN_DIR: pluginDir: must be an absolute path, not relative")
