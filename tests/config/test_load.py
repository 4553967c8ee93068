from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_agent.config import Config, ConfigError, MetricsConfig, default_config, load, parse
from npu_agent.config.schema import HealthConfig
from npu_agent.config.values import MAX_BYTES
from npu_agent.vendors import SPEC

if TYPE_CHECKING:
    from collections.abc import Callable


def config_of(text: str) -> Config:
    return parse(text.encode(), "config.yaml", SPEC).config


def error_of(text: str | bytes) -> ConfigError:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        parse(data, "config.yaml", SPEC)
    return caught.value


def test_numbers_and_flags_in_every_form() -> None:
    config = config_of("""\
interval: '5'
health: {interval: .25, recoveries: +4, maxTemperature: 9.5e1}
metrics: {schema: 2025, podLabels: "false"}
events: FALSE
""")
    assert (config.interval, config.events) == (5.0, False)
    assert config.health == HealthConfig(interval=0.25, recoveries=4, max_temperature=95.0)
    assert config.metrics == MetricsConfig(schema="2025", pod_labels=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "--- ~\n...\n",
        "{}",
        "\ufeff",
        "health:\nresources:  # none\n",
    ],
)
def test_an_empty_file_is_the_defaults(text: str) -> None:
    assert config_of(text) == default_config(SPEC)


@pytest.mark.parametrize(
    "name",
    ["a/b", "beta.furiosa.ai/npu", "furiosa.ai/rngd-2core.12gb", "x" * 244 + "/" + "y" * 63],
)
def test_good_resource_names(name: str) -> None:
    assert config_of(f"resourceName: {name}").resource_name == name


@pytest.mark.parametrize(
    "name",
    [
        "npu",
        "furiosa.ai/npu/x",
        "Furiosa.ai/npu",
        "kubernetes.io/npu",
        "node.kubernetes.io/npu",
        "requests.furiosa.ai/npu",
        "x" * 245 + "/y",
        "x/" + "y" * 64,
        '"furiosa.ai/npu\\n"',
    ],
)
def test_bad_resource_names(name: str) -> None:
    [problem] = error_of(f"resourceName: {name}").problems
    assert problem.message.startswith(
        "must be <domain>/<name> like beta.furiosa.ai/npu, outside kubernetes.io, not "
    )


@pytest.mark.parametrize(
    "listen",
    [
        *("9100", ":", ":65536", "::1:9100", "localhost:1", ":1 ", "[::1:1", "::1"),
        *("[::1..2]:1", f"[{'1' * 64}]:1", f"[::1.{'2' * 64}]:1"),
    ],
)
def test_bad_addresses(listen: str) -> None:
    [problem] = error_of(f"metrics:\n  listen: '{listen}'").problems
    assert problem.key == "metrics.listen"
    assert problem.message.startswith(
        "must be [IP address]:port like :9100, 127.0.0.1:9100 or [::1]"
    )


# A file, "-->", and what is said about it; a block without "-->" is a heading.
GOLDEN = (
    (Path(__file__).parent / "errors.txt")
    .read_text(encoding="utf-8")
    .removesuffix("\n")
    .split("\n====\n")
)
ERRORS = [block.split("\n-->\n") for block in GOLDEN if "\n-->\n" in block]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[text[:40] for text, _ in ERRORS])
def test_error(text: str, message: str) -> None:
    assert str(error_of(text)) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\n\xc3\xa9: \xc3", "config.yaml:2: not UTF-8: save the file as UTF-8"),
        (b"a: 1\nb\x00", "config.yaml: not YAML: control characters are not allowed"),
        (
            b"interval: " + b"9" * 5000,
            f"config.yaml:1: interval: must be a number (seconds), 0.1 to 3600, not {'9' * 60}…",
        ),
    ],
    ids=["half a character", "NUL", "many digits"],
)
def test_error_that_is_no_text_for_a_golden_file(data: bytes, message: str) -> None:
    assert str(error_of(data)) == message


def test_the_longest_node_name() -> None:
    text = "disabledDevices: [{devName: npu0, nodeName: %s}]"
    assert config_of(text % ("n" * 253)).disabled_devices[0].node_name == "n" * 253
    [problem] = error_of(text % ("n" * 254)).problems
    assert problem.key == "disabledDevices[0].nodeName"


def test_after_twenty_problems_it_stops() -> None:
    text = "disabledDevices:\n" + "- 1\n" * 50
    assert [problem.place.line for problem in error_of(text).problems] == list(range(2, 22))
    twice = "resources:\n" + "- {name: a/b, family: rngd, coresPerDevice: 3}\n" * 50
    assert len(error_of(twice).problems) == 20


def test_origins() -> None:
    text = b"events: false\nhealth:\n  failures: 3\nlabels:\nresources:\n"
    effective = parse(text, "f.yaml", SPEC)
    set_by_file = {k: v for k, v in effective.origins.items() if v != "default"}
    assert set_by_file == {"events": "f.yaml:1", "health.failures": "f.yaml:3"}


# Files


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, SPEC)
    return str(caught.value).replace(str(path), "FILE")


def missing(path: Path) -> None:
    pass


def large(path: Path) -> None:
    path.write_bytes(b"#" * (256 * 1024 + 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing, "FILE: no such file: create it, or mount the ConfigMap there"),
        (Path.mkdir, "FILE: cannot be read by uid {uid}: this is a directory"),
        (large, "FILE: larger than 256 KiB: this is not a configuration of npu-agent"),
    ],
)
def test_files_that_cannot_be_read(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    make(path)
    assert refusal_of(path) == message.format(uid=os.geteuid())


# Nothing but ConfigError, whatever it is given


def only_config_errors(data: bytes) -> None:
    try:
        effective = parse(data, "config.yaml", SPEC)
    except ConfigError as error:
        assert error.problems  # noqa: PT017
        lines = data.decode("utf-8", "replace").splitlines() or [""]
        for problem in error.problems:
            assert "\n" not in str(problem)
            assert problem.place.line is None or 1 <= problem.place.line <= len(lines)
    else:
        assert isinstance(effective.config, Config)


def test_the_largest_files_end() -> None:
    # No more than a hang is looked for: each of these was quadratic in some YAML reader, or
    # would be in a careless pattern or rule.
    for text in ("[", "{", "- ", "? ", "&a ", "[a,", "'", "\n", "x" * 99 + ": 1\n"):
        only_config_errors((text * MAX_BYTES)[:MAX_BYTES].encode())
    only_config_errors(f"resourceName: {'a.' * 130_000}".encode())
    only_config_errors(f"interval: {'1' * 260_000}".encode())
    only_config_errors(f"log: {{level: {'debug' * 52_000}}}".encode())
    only_config_errors(f"labels: {{sets: [{'beta,' * 10_000}]}}".encode())
