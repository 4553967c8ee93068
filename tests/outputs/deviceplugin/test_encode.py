"""The bytes written by hand are what betterproto writes for the same message, and say the same."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_agent.core.grant import grant
from npu_agent.core.hardware import CoreRange
from npu_agent.core.offer import Device
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.deviceplugin import encode
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import devnames, selectors

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
