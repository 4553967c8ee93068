"""The bytes written by hand are what betterproto writes for the same message, and say the same."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_agent.core.grant import Grant
from npu_agent.core.offer import Device
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.deviceplugin import encode
from tests.outputs.deviceplugin.helpers import devices, state

# Lengths on both sides of where a varint needs one more byte, and text of more than one byte.
LONG = ["", "a", "é", "x" * 127, "x" * 128, "ü" * 64, "x" * 16_383, "x" * 16_384]
text = st.sampled_from(LONG) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
words = text.filter(bool)


def made(id_: str, healthy: bool, numa: int | None) -> Device:
    (device,) = devices(state(numa_node=numa))
    return replace(device, id=id_, healthy=healthy)


some_device = st.builds(
    made, words, st.booleans(), st.none() | st.sampled_from((0, 1, 127, 128, 65_535))
)
some_grant = st.builds(
    Grant,
    environment=st.dictionaries(words, text, max_size=5).map(lambda found: tuple(found.items())),
    nodes=st.lists(st.tuples(words, words), max_size=5).map(tuple),
    cdi_names=st.lists(words, max_size=5).map(tuple),
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


def allocated(granted: Grant, by_cdi: bool) -> wire.AllocateResponse:
    container = wire.ContainerAllocateResponse(envs=dict(granted.environment))
    if by_cdi:
        container.cdi_devices = [wire.CdiDevice(name=name) for name in granted.cdi_names]
    else:
        container.devices = [
            wire.DeviceSpec(container_path=path, host_path=host_path, permissions="rw")
            for path, host_path in granted.nodes
        ]
    return wire.AllocateResponse(container_responses=[container])


@settings(max_examples=30)
@given(st.lists(some_device, max_size=8))
@example([made("Ä" * 70, healthy=True, numa=0)])
def test_device_list_is_byte_for_byte_what_betterproto_writes(found: list[Device]) -> None:
    encoded = encode.device_list(found)
    assert encoded == bytes(listed(found))
    assert wire.ListAndWatchResponse().parse(encoded).to_dict() == listed(found).to_dict()


@settings(max_examples=30)
@given(some_grant, st.booleans())
def test_container_response_is_what_betterproto_writes(granted: Grant, by_cdi: bool) -> None:
    encoded = encode.container_response(granted, by_cdi=by_cdi)
    parsed = wire.AllocateResponse().parse(encoded)
    assert parsed.to_dict() == allocated(granted, by_cdi).to_dict()
    if all(value for _, value in granted.environment):  # betterproto leaves an empty one out
        assert encoded == bytes(allocated(granted, by_cdi))
