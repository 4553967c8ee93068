from __future__ import annotations

from dataclasses import replace

from npu_agent.config import (
    Change,
    Config,
    DisabledDevice,
    HealthConfig,
    ResourceSpec,
    changes,
)
from npu_agent.config.compare import in_force


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


def test_a_change_of_thousands_of_items_is_a_line_that_people_can_read() -> None:
    many = tuple(DisabledDevice(dev_name=f"npu{index}") for index in range(9000))
    (change,) = changes(Config(), Config(disabled_devices=many))
    assert len(str(change)) < 1000
    assert str(change).endswith("{devName: npu15}, … and 8,984 more]")
