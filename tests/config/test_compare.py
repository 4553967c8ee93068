from __future__ import annotations

from dataclasses import replace

from npu_agent.config import Config, DisabledDevice, HealthConfig, ResourceSpec
from npu_agent.config.compare import Change, changes


def test_values_and_restart() -> None:
    old = Config(socket_name="furiosa-npu", health=HealthConfig(max_temperature=90.0))
    new = Config(socket_name="x", disabled_devices=(DisabledDevice(dev_name="npu0"),))
    found, in_force = changes(old, new)
    assert found == (
        Change("disabledDevices", (), (DisabledDevice(dev_name="npu0"),), needs_restart=False),
        Change("socketName", "furiosa-npu", "x", needs_restart=True),
        Change("health.maxTemperature", 90.0, None, needs_restart=False),
    )
    assert list(map(str, found)) == [
        "disabledDevices: [] -> [{devName: npu0}]",
        "socketName: furiosa-npu -> x",
        "health.maxTemperature: 90 -> null",
    ]
    assert in_force == replace(new, socket_name="furiosa-npu")


def test_of_resources_the_api_applies_while_running_and_nothing_else_does() -> None:
    def config(*specs: ResourceSpec) -> Config:
        return Config(resources=specs)

    one = ResourceSpec(name="a.b/c", family="rngd")
    before = config(one)
    by_dra = config(replace(one, api="dra"))
    (change,), in_force = changes(before, by_dra)
    assert (change.needs_restart, in_force) == (False, by_dra)
    for other in (
        config(replace(one, api="dra", cores_per_device=4)),
        config(replace(one, api="dra", name="a.b/d")),
        config(replace(one, api="dra"), ResourceSpec(name="a.b/e", family="warboy")),
        config(),
    ):
        (change,), in_force = changes(before, other)
        assert (change.needs_restart, in_force) == (True, before)


def test_a_change_of_thousands_of_items_is_a_line_that_people_can_read() -> None:
    many = tuple(DisabledDevice(dev_name=f"npu{index}") for index in range(9000))
    ((change,), _) = changes(Config(), Config(disabled_devices=many))
    assert len(str(change)) < 1000
    assert str(change).endswith("{devName: npu15}, … and 8,984 more]")
