from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from npu_agent.config import (
    KEYS,
    Config,
    DisabledDevice,
    MetricsConfig,
    default_config,
    disabled_for,
    schema,
)
from npu_agent.config.kinds import Kind, number
from npu_agent.config.schema import keys_of, schema_of
from npu_agent.vendors import REGISTRY


def test_keys_and_options_as_the_specification_names_them() -> None:
    assert {key.name: key.option for key in KEYS} == {
        "defaultPe": "--default-pe",
        "interval": "--interval",
        "disabledDevices": "--disabled-devices",
        "pluginDir": "--plugin-dir",
        "socketName": "--socket-name",
        "resourceName": "--resource-name",
        "resources": "--resources",
        "allocation.method": "--allocation-method",
        "allocation.api": "--allocation-api",
        "allocation.nodes": "--allocation-nodes",
        "dra.deviceNames": "--dra-device-names",
        "dra.partitions": "--dra-partitions",
        "health.interval": "--health-interval",
        "health.failures": "--health-failures",
        "health.recoveries": "--health-recoveries",
        "health.maxTemperature": "--health-max-temperature",
        "health.evict": "--health-evict",
        "labels.output": "--labels-output",
        "labels.sets": "--labels-sets",
        "labels.resync": "--labels-resync",
        "metrics.listen": "--metrics-listen",
        "metrics.probes": "--metrics-probes",
        "metrics.schema": "--metrics-schema",
        "metrics.podLabels": "--metrics-pod-labels",
        "metrics.interval": "--metrics-interval",
        "metrics.authorization": "--metrics-authorization",
        "metrics.tls.certFile": "--metrics-tls-cert-file",
        "metrics.tls.keyFile": "--metrics-tls-key-file",
        "metrics.tls.clientCAFile": "--metrics-tls-client-ca-file",
        "events": "--events",
        "log.level": "--log-level",
        "log.format": "--log-format",
    }


def test_defaults() -> None:
    assert {key.name: key.default for key in keys_of(schema_of(REGISTRY))} == {
        "defaultPe": "Fusion",
        "interval": 10.0,
        "disabledDevices": (),
        "pluginDir": "/var/lib/kubelet/device-plugins",
        "socketName": "furiosa-npu",
        "resourceName": "beta.furiosa.ai/npu",
        "resources": (),
        "allocation.method": "deviceNodes",
        "allocation.api": "device-plugin",
        "allocation.nodes": (),
        "dra.deviceNames": "identity",
        "dra.partitions": False,
        "health.interval": 0.5,
        "health.failures": 2,
        "health.recoveries": 3,
        "health.maxTemperature": None,
        "health.evict": False,
        "labels.output": "api",
        "labels.sets": ("beta",),
        "labels.resync": 300.0,
        "metrics.listen": ":9100",
        "metrics.probes": None,
        "metrics.schema": "0.8",
        "metrics.podLabels": True,
        "metrics.interval": 5.0,
        "metrics.authorization": "none",
        "metrics.tls.certFile": None,
        "metrics.tls.keyFile": None,
        "metrics.tls.clientCAFile": None,
        "events": True,
        "log.level": "info",
        "log.format": "text",
    }
    assert all(
        key.value(default_config(REGISTRY)) == key.default for key in keys_of(schema_of(REGISTRY))
    )


def test_keys_that_wait_for_a_restart() -> None:
    assert {key.name for key in KEYS if not key.live} == {
        "pluginDir",
        "socketName",
        "resourceName",
        "resources",
        "allocation.method",
        "dra.deviceNames",
        "labels.output",
        "metrics.listen",
        "metrics.probes",
        "metrics.authorization",
        "metrics.tls.certFile",
        "metrics.tls.keyFile",
        "metrics.tls.clientCAFile",
    }


def test_every_number_has_limits() -> None:
    kinds = [key.of.json for key in KEYS if isinstance(key.of, Kind)]
    numbers = [json for json in kinds if json.get("type") in ("integer", "number")]
    assert len(numbers) == 7
    for limits in numbers:
        assert 0 < limits["minimum"] < limits["maximum"]


def test_a_new_key_is_one_entry() -> None:
    @dataclass(frozen=True, kw_only=True)
    class NewConfig(schema.Config):
        """With one key more."""

        drain_after: float | None = schema._restart(
            None, "Seconds until it is drained.", number(float, 1, 9, "seconds")
        )

    keys = schema._group(NewConfig, REGISTRY).keys
    assert set(keys) - set(schema_of(REGISTRY).keys) == {"drainAfter"}
    key = keys["drainAfter"]
    assert (key.option, key.live, key.optional) == ("--drain-after", False, True)
    assert (key.of.must, key.of.placeholder) == ("a number (seconds)", "SECONDS")


def test_values_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Config().health.interval = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        (":9100", ("", 9100)),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("node.example:65535", ("node.example", 65535)),
    ],
)
def test_address(listen: str, address: tuple[str, int]) -> None:
    assert MetricsConfig(listen=listen).address == address


@pytest.mark.parametrize(
    ("config", "address"),
    [
        (MetricsConfig(listen=":9100"), ("", 9101)),
        (MetricsConfig(listen="[::1]:9410"), ("::1", 9411)),
        (MetricsConfig(listen="127.0.0.1:0"), ("127.0.0.1", 0)),
        (MetricsConfig(listen=":65535"), ("", 65534)),
        (MetricsConfig(listen="127.0.0.1:9100", probes=":80"), ("", 80)),
    ],
)
def test_probes_are_at_the_next_port_unless_it_is_given(
    config: MetricsConfig, address: tuple[str, int]
) -> None:
    assert config.probes_address == address


def test_disabled_for() -> None:
    config = Config(
        disabled_devices=(
            DisabledDevice(dev_name="npu0"),
            DisabledDevice(dev_name="npu1", node_name="here"),
            DisabledDevice(dev_name="npu2", node_name="there"),
        )
    )
    assert disabled_for(config, "here") == {"npu0", "npu1"}
    assert disabled_for(config, "elsewhere") == {"npu0"}
    assert disabled_for(config, None) == {"npu0"}


def test_import_brings_neither_yaml_nor_argparse() -> None:
    code = "import sys, npu_agent.config as c; print({'yaml', 'argparse'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
