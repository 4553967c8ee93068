from __future__ import annotations

from dataclasses import replace

from npu_agent.config import Config, DisabledDevice, HealthConfig
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


def test_a_change_of_thousands_of_items_is_a_line_that_people_can_read() -> None:
    many = tuple(DisabledDevice(dev_name=f"npu{index}") for index in range(9000))
    ((change,), _) = changes(Config(), Config(disabled_devices=many))
    assert len(str(change)) < 1000
    assert str(change).endswith("{devName: npu15}, … and 8,984 more]")
