from __future__ import annotations

import json

import pytest

from npu_agent.config import Config, ConfigError, MetricsConfig, disabled_for, parse
from npu_agent.config.schema import DisabledDevice
from npu_agent.vendors import SPEC


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
        (MetricsConfig(listen="[::1]:9410"), ("", 9411)),
        (MetricsConfig(listen="127.0.0.1:0"), ("", 0)),
        (MetricsConfig(listen=":65535"), ("", 65534)),
        (MetricsConfig(listen="127.0.0.1:9100", probes=":80"), ("", 80)),
    ],
)
def test_probes_are_at_the_next_port_of_every_interface_unless_it_is_given(
    config: MetricsConfig, address: tuple[str, int]
) -> None:
    assert config.probes_address == address


def test_disabled_for_a_node_in_any_case() -> None:
    config = Config(
        disabled_devices=(
            DisabledDevice(dev_name="NPU0"),
            DisabledDevice(dev_name="npu1", node_name="here"),
            DisabledDevice(dev_name="npu2", node_name="there"),
        )
    )
    assert disabled_for(config, "here") == {"npu0", "npu1"}
    assert disabled_for(config, "elsewhere") == {"npu0"}
    assert disabled_for(config, None) == {"npu0"}


@pytest.mark.parametrize(
    "path",
    [
        *("/dev/dma_heap/system", "/dev/kvm", "/dev/infiniband/uverbs0"),
        "/dev/npv0",
    ],
)
def test_device_nodes_for_all_containers(path: str) -> None:
    assert device_nodes(path) == (path,)


@pytest.mark.parametrize(
    "path",
    [
        *("/dev", "/dev/", "/dev/../etc/shadow", "/dev/a/../b", "/dev//a", "/dev/./a", "/dev/a/"),
        *("/sys/class", "dev/kvm", "/dev/a b", "/dev/a\n"),
        # The cards' own: a core has one container.
        *("/dev/npu0", "/dev/npu3pe0-1", "/dev/rngd/npu0mgmt"),
    ],
)
def test_a_path_that_is_no_device_node_or_a_cards_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="a path below /dev"):
        device_nodes(path)


def device_nodes(path: str) -> tuple[str, ...]:
    text = json.dumps({"containers": {"deviceNodes": [path]}})
    return parse(text.encode(), "config.yaml", SPEC).config.containers.device_nodes
