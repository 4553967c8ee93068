"""The bytes written by hand are what betterproto writes for the same message, and say the same."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_agent.core.grant import grant
from npu_agent.core.hardware import CoreRange
from npu_agent.core.offer import Device
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.deviceplugin import encode
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import devices, devnames, selectors, state

# Lengths on both sides of where a varint needs one more byte, and text of more than one byte.
LONG = ["", "a", "é", "x" * 127, "x" * 128, "ü" * 64, "x" * 16_383, "x" * 16_384]
text = st.sampled_from(LONG) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
words = st.lists(text.filter(bool), max_size=5).map(tuple)


def made(
    id_: str,
    healthy: bool,
    numa: int | None,
    names: tuple[str, ...],
    nodes: tuple[str, ...],
    index: int,
) -> Device:
    return Device(
        id=id_,
        card_id=id_,
        cores=CoreRange(0, 1),
        name="npu0",
        healthy=healthy,
        reason="",
        card=FAMILIES["warboy"].card(index, product="warboy", numa_node=numa),
        environment=(("NPU_DEVNAME", names), ("FURIOSA_DEVICES", names)),
        nodes=nodes,
    )


some_device = st.builds(
    made,
    text.filter(bool),
    st.booleans(),
    st.none() | st.sampled_from((0, 1, 127, 128, 65_535)),
    words,
    words,
    st.integers(0, 1000),
)


def listed(devices: list[Device]) -> wire.ListAndWatchResponse:
    """The message as the generated classes would build it."""
    return wire.ListAndWatchResponse(
        devices=[
            wire.Device(
                id=device.id,
                health="Healthy" if device.healthy else "Unhealthy",
                topology=None  # type: ignore[arg-type]
                if device.card.numa_node is None
                else wire.TopologyInfo(nodes=[wire.NumaNode(id=device.card.numa_node)]),
            )
            for device in devices
        ]
    )


def allocated(granted: list[Device]) -> wire.AllocateResponse:
    ordered = sorted(granted, key=lambda device: device.order)
    nodes = dict.fromkeys(node for device in ordered for node in device.nodes)
    return wire.AllocateResponse(
        container_responses=[
            wire.ContainerAllocateResponse(
                envs={
                    "NPU_DEVNAME": ",".join(n for d in ordered for n in devnames(d)),
                    "FURIOSA_DEVICES": ",".join(s for d in ordered for s in selectors(d)),
                },
                devices=[
                    wire.DeviceSpec(
                        container_path=f"/dev/{node}", host_path=f"/dev/{node}", permissions="rw"
                    )
                    for node in nodes
                ],
            )
        ]
    )


@settings(max_examples=30)
@given(st.lists(some_device, max_size=8))
@example([made("Ä" * 70, healthy=True, numa=0, names=(), nodes=(), index=0)])
def test_device_list_is_byte_for_byte_what_betterproto_writes(found: list[Device]) -> None:
    encoded = encode.device_list(found)
    assert encoded == bytes(listed(found))
    assert wire.ListAndWatchResponse().parse(encoded).to_dict() == listed(found).to_dict()


@settings(max_examples=30)
@given(st.lists(some_device, min_size=1, max_size=5))
def test_container_response_is_what_betterproto_writes(granted: list[Device]) -> None:
    encoded = encode.container_response(grant(granted))
    parsed = wire.AllocateResponse().parse(encoded)
    assert parsed.to_dict() == allocated(granted).to_dict()
    if all(devnames(device) for device in granted):  # betterproto leaves an empty value out
        assert encoded == bytes(allocated(granted))


@pytest.mark.parametrize(("numa", "topology"), [(None, False), (0, True), (1, True)])
def test_numa_node_zero_is_told_and_no_numa_node_is_no_topology(
    numa: int | None, topology: bool
) -> None:
    encoded = encode.device_list(devices(state(numa_node=numa)))
    (device,) = wire.ListAndWatchResponse().parse(encoded).devices
    assert [node.id for node in device.topology.nodes] == ([numa] if topology else [])
    # Field 3 of Device is there or not: absent is what "no NUMA node" has to be.
    assert (b"\x1a" in encoded[-6:]) == topology


def test_several_devices_are_told_in_card_order_and_shared_nodes_once() -> None:
    first, second = devices(state(index=10), state(index=2), cores=1)[:2]
    assert first.name == "npu10pe0"
    encoded = encode.container_response(grant([second, first, devices(state(index=2), cores=1)[0]]))
    (given_,) = wire.AllocateResponse().parse(encoded).container_responses
    assert given_.envs == {
        "NPU_DEVNAME": "npu2pe0,npu10pe0,npu10pe1",
        "FURIOSA_DEVICES": "npu:2:0,npu:10:0,npu:10:1",
    }
    paths = [device.container_path for device in given_.devices]
    assert len(paths) == len(set(paths))
    assert paths.count("/dev/npu10_mgmt") == 1
    assert [device.host_path for device in given_.devices] == paths
    assert {device.permissions for device in given_.devices} == {"rw"}
