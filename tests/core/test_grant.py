import json
from dataclasses import replace

import pytest

from npu_agent.core.grant import Refusal, RefusalError, grant
from npu_agent.core.hardware import HealthState
from npu_agent.core.ledger import footprint
from npu_agent.kubelet.cdi import claim_spec, plugin_spec
from npu_agent.kubelet.wire import v1beta1 as wire
from tests.outputs.deviceplugin.helpers import allocate, devices, state

BAD = "UUID-BAD"
KNOWN = {
    device.id: device
    for device in devices(
        state(index=0, id_="UUID-A"),
        state(index=1, id_="UUID-B"),
        state(index=2, id_=BAD, health=HealthState.UNHEALTHY, reason="alive says 0"),
    )
}
RESOURCE = "beta.furiosa.ai/npu"
NOT_LISTED = (
    "is not one of beta.furiosa.ai/npu on this node now: it was removed, disabled, cut into other "
    "parts, or has moved to DRA (3 are listed)"
)


def parsed(answer: bytes) -> list[wire.ContainerAllocateResponse]:
    return wire.AllocateResponse().parse(answer).container_responses


def test_a_simulated_card_has_null_in_place_of_its_nodes() -> None:
    real = KNOWN["UUID-B"]
    device = replace(real, card=replace(real.card, simulated=True))
    (container,) = parsed(allocate([["UUID-B"]], {"UUID-B": device}, RESOURCE))
    assert container.devices == [
        wire.DeviceSpec(container_path=f"/dev/{node}", host_path="/dev/null", permissions="rw")
        for node in real.nodes
    ]


def test_each_container_has_an_answer_of_its_own_in_the_order_asked() -> None:
    first, second = parsed(allocate([["UUID-B"], ["UUID-A"]], KNOWN, RESOURCE))
    assert first.envs["NPU_DEVNAME"] == "npu1pe0-1"
    assert second.envs["NPU_DEVNAME"] == "npu0pe0-1"


@pytest.mark.parametrize(
    ("requests", "wrong", "message"),
    [
        ([], Refusal.INVALID, "Allocate for beta.furiosa.ai/npu names no container"),
        ([[]], Refusal.INVALID, "Allocate for beta.furiosa.ai/npu names no device"),
        ([["UUID-A"], ["UUID-A"]], Refusal.INVALID, "device 'UUID-A' is asked for twice"),
        ([["UUID-A", BAD]], Refusal.UNFIT, "device 'UUID-BAD' (npu2) is unhealthy: alive says 0"),
        ([["x" * 5000]], Refusal.UNKNOWN, f"device '{'x' * 80}'... {NOT_LISTED}"),
        ([["\x1b[2J\n"]], Refusal.UNKNOWN, rf"device '\x1b[2J\n' {NOT_LISTED}"),
    ],
)
def test_wrong_request_is_refused_with_the_id_and_the_reason(
    requests: list[list[str]], wrong: Refusal, message: str
) -> None:
    with pytest.raises(RefusalError) as refusal:
        allocate(requests, KNOWN, RESOURCE)
    assert (refusal.value.kind, str(refusal.value)) == (wrong, message)


def test_nodes_of_the_host_come_once_with_any_device_and_belong_to_no_holder() -> None:
    heap = "/dev/dma_heap/system"
    states = [replace(state("rngd", at, id_=f"R{at}"), host_nodes=(heap,)) for at in (0, 1)]
    listed = {device.id: device for device in devices(*states)}
    (container,) = parsed(allocate([["R0", "R1"]], listed, RESOURCE))
    paths = [node.container_path for node in container.devices]
    assert paths.count(heap) == 1
    assert len(paths) == 1 + sum(len(device.nodes) for device in listed.values())
    assert {node.permissions for node in container.devices} == {"rw"}
    one, other = (footprint(device) for device in listed.values())
    assert not one.nodes & other.nodes
    assert not any("dma_heap" in node for node in one.nodes)
    by_claim = json.loads(claim_spec("k/c", "u", {"npu": grant(listed.values())}))
    by_kubelet = json.loads(plugin_spec("k/p", listed.values()) or b"")
    for device in (*by_claim["devices"], *by_kubelet["devices"]):
        nodes = [node["hostPath"] for node in device["containerEdits"]["deviceNodes"]]
        assert nodes.count(heap) == 1
    (simulated,) = devices(replace(states[0], card=replace(states[0].card, simulated=True)))
    assert (heap, "/dev/null") in grant([simulated]).nodes
