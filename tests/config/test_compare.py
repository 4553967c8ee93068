from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given

from npu_agent.config import (
    KEYS,
    Change,
    Config,
    DisabledDevice,
    HealthConfig,
    Key,
    ResourceSpec,
    changes,
    parse,
)
from npu_agent.config.compare import in_force
from npu_agent.vendors import REGISTRY

from .strategies import CONFIGS, FEW

OTHER = {
    "defaultPe": "Single",
    "interval": "5",
    "disabledDevices": "[{devName: npu0, nodeName: a}]",
    "pluginDir": "/a",
    "socketName": "a",
    "resourceName": "a/b",
    "resources": "[{name: a/b, family: rngd}]",
    "allocation.method": "cdi",
    "allocation.api": "dra",
    "allocation.nodes": "[{nodeName: n1, api: dra}]",
    "dra.deviceNames": "index",
    "dra.partitions": "true",
    "health.interval": "1",
    "health.failures": "3",
    "health.recoveries": "4",
    "health.maxTemperature": "95.5",
    "health.evict": "true",
    "labels.output": "nfd",
    "labels.sets": "[beta, current]",
    "labels.resync": "60",
    "metrics.listen": '":1"',
    "metrics.probes": '":2"',
    "metrics.schema": '"2025"',
    "metrics.podLabels": "false",
    "metrics.interval": "1",
    "metrics.authorization": "kubernetes",
    "metrics.tls.certFile": "/x",
    "metrics.tls.keyFile": "/x",
    "metrics.tls.clientCAFile": "/x",
    "events": "false",
    "log.level": "debug",
    "log.format": "json",
}


CERTIFICATE = {"metrics.tls.certFile": "/c", "metrics.tls.keyFile": "/k"}
"""Which go together."""


def written(values: Mapping[str, str]) -> bytes:
    """A file that has these values."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        within = tree
        for each in groups:
            within = within.setdefault(each, {})
        within[last] = yaml.safe_load(value)
    return yaml.safe_dump(tree).encode()


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_key_alone(key: Key) -> None:
    name = key.name
    beside = CERTIFICATE if name.startswith(("metrics.tls", "metrics.auth")) else {}
    old, new = written(beside), written({**beside, name: OTHER[name]})
    [change] = changes(parse(old, "f", REGISTRY).config, parse(new, "f", REGISTRY).config)
    assert change.key == name
    assert str(change).startswith(f"{name}: ")
    assert str(change).endswith(f" -> {OTHER[name]}")


def test_values_and_restart() -> None:
    old = Config(socket_name="furiosa-npu", health=HealthConfig(max_temperature=90.0))
    new = Config(socket_name="x", disabled_devices=(DisabledDevice(dev_name="npu0"),))
    assert changes(old, new) == (
        Change("disabledDevices", (), (DisabledDevice(dev_name="npu0"),), needs_restart=False),
        Change("socketName", "furiosa-npu", "x", needs_restart=True),
        Change("health.maxTemperature", 90.0, None, needs_restart=False),
    )
    assert list(map(str, changes(old, new))) == [
        "disabledDevices: [] -> [{devName: npu0}]",
        "socketName: furiosa-npu -> x",
        "health.maxTemperature: 90 -> null",
    ]


def test_of_resources_the_api_applies_while_running_and_nothing_else_does() -> None:
    def config(*specs: ResourceSpec) -> Config:
        return Config(resources=specs)

    one = ResourceSpec(name="a.b/c", family="rngd")
    before = config(one)
    by_dra = config(replace(one, api="dra"))
    assert [change.needs_restart for change in changes(before, by_dra)] == [False]
    assert in_force(before, by_dra) == by_dra
    for other in (
        config(replace(one, api="dra", cores_per_device=4)),
        config(replace(one, api="dra", name="a.b/d")),
        config(replace(one, api="dra"), ResourceSpec(name="a.b/e", family="warboy")),
        config(),
    ):
        assert [change.needs_restart for change in changes(before, other)] == [True]
        assert in_force(before, other) == before


@FEW
@given(CONFIGS)
def test_no_change(config: Config) -> None:
    assert changes(config, config) == ()


@FEW
@given(CONFIGS, CONFIGS)
def test_back_is_the_same_way(one: Config, other: Config) -> None:
    there = {(c.key, c.needs_restart, id(c.old), id(c.new)) for c in changes(one, other)}
    back = {(c.key, c.needs_restart, id(c.new), id(c.old)) for c in changes(other, one)}
    assert there == back
    assert bool(there) == (one != other)


def test_a_change_of_thousands_of_items_is_a_line_that_people_can_read() -> None:
    many = tuple(DisabledDevice(dev_name=f"npu{index}") for index in range(9000))
    (change,) = changes(Config(), Config(disabled_devices=many))
    assert len(str(change)) < 1000
    assert str(change).endswith("{devName: npu15}, … and 8,984 more]")
