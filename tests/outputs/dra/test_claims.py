"""Prepare and Unprepare: what the kubelet is answered, what is on the disk, and who is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.grant import RefusalError
from npu_agent.core.hardware import HealthState
from npu_agent.core.ledger import UNIDENTIFIED, Assignment, DeviceName, Ledger
from npu_agent.core.offer import Device
from npu_agent.core.pool import PoolDevice
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kubelet import allocator
from npu_agent.kubelet.podresources import Holdings
from npu_agent.kubelet.record import RECORD, read_record, recover
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.outputs.dra.claims import PrepareTiming
from tests.outputs.deviceplugin.helpers import devices, state
from tests.outputs.dra.room import NPU, Room, ref, result
from tests.outputs.helpers import DRIVER
from tests.until import until

ZERO, ONE = "npu-warboy-0", "npu-warboy-1"
SPEC = "furiosa.ai-claim-uid-c.json"
HELD = "Pod team/pod-c (ResourceClaim team/c) still holds its cores"


def answer(*found: tuple[str, str], uid: str = "uid-c") -> tuple[v1.Device, ...]:
    """For each request and device."""
    return tuple(
        v1.Device([request], "node-1", device, [f"furiosa.ai/claim={uid}-{request}"])
        for request, device in found
    )


def reserved(*pods: str) -> list[dict[str, str]]:
    """What a claim for these Pods has in its status."""
    return [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]


@pytest.fixture
async def room(tmp_path: Path) -> Room:
    """A node that is ours."""
    found = Room(tmp_path)
    await found.owned()
    return found


@pytest.fixture
async def held(room: Room) -> Room:
    """A node on which a claim ``c`` is prepared."""
    room.claim("c", result(ZERO))
    await room.prepared()
    return room


def spec(room: Room, name: str = SPEC) -> dict[str, Any]:
    """The edits of a claim's spec, by the names of its CDI devices."""
    found = json.loads((room.cdi_root / name).read_bytes())
    assert (found["cdiVersion"], found["kind"]) == ("0.5.0", "furiosa.ai/claim")
    return {one["name"]: one["containerEdits"] for one in found["devices"]}


def nodes(edits: dict[str, Any]) -> list[str]:
    assert all(one["hostPath"] == one["path"] for one in edits["deviceNodes"])
    assert all(one["permissions"] == "rw" for one in edits["deviceNodes"])
    return [one["path"] for one in edits["deviceNodes"]]


def variables(room: Room) -> dict[str, str]:
    """The first one of each request of the claim, by the names of its CDI devices."""
    return {name: edits["env"][0] for name, edits in spec(room).items()}


def plain(room: Room, index: int = 0) -> Device:
    """A card as the device plugin would hand it out."""
    return devices(*room.cards)[index]


async def test_a_claim_is_prepared(room: Room) -> None:
    room.claim("c", result(ZERO))
    assert await room.prepared() == answer(("npu", ZERO))
    edits = spec(room)["uid-c-npu"]
    assert edits["env"] == ["NPU_DEVNAME=npu0pe0-1", "FURIOSA_DEVICES=npu:0:0-1"]
    assert nodes(edits) == [f"/dev/{node}" for node in plain(room).nodes]
    record = json.loads(room.record.read_bytes())
    assert record["prepared"]["uid-c"]["devices"][0]["device"] == ZERO
    assert room.claims.counts.prepares == {"prepared": 1, "refused": 0, "failed": 0}


async def test_a_spec_that_is_gone_is_written_again(
    held: Room, caplog: pytest.LogCaptureFixture
) -> None:
    before = (held.cdi_root / SPEC).read_bytes()
    shutil.rmtree(held.cdi_root)
    del held.api["team", "c"]  # the API server is not needed
    await held.claims.upkeep.sync_specs()
    assert (held.cdi_root / SPEC).read_bytes() == before
    await held.claims.upkeep.sync_specs()
    assert caplog.text.count("written again") == 1
    await held.unprepared()
    await held.claims.upkeep.sync_specs()
    assert held.specs() == []


async def test_no_spec_is_removed_while_prepared_claims_are_not_known(held: Room) -> None:
    """The record is damaged, and the kubelet may not list all of its Pods yet."""
    unsure = recover(replace(held.allocator.states.value, prepared={}), b"", held.clock())
    held.allocator.states.publish(unsure)
    held.allocator.recovery_done()
    await held.claims.upkeep.sync_specs()
    assert held.specs() == [SPEC]
    for _ in range(2):
        held.says()
    await held.claims.upkeep.sync_specs()
    assert held.specs() == []


async def test_a_spec_with_other_nodes_than_its_pods_were_given_is_not_written(held: Room) -> None:
    before = held.allocator.prepared.value
    (held.cdi_root / SPEC).unlink()
    held.have(state(index=5, id_=held.cards[0].id))
    await held.claims.upkeep.sync_specs()
    assert held.specs() == []
    assert held.allocator.prepared.value == before  # the old nodes are still held


async def test_a_claim_unprepared_on_a_disk_that_cannot_be_written_does_not_come_back(
    held: Room, disk: set[str]
) -> None:
    disk.add("")
    await held.unprepared()
    assert held.allocator.prepared.value == {}
    assert held.specs() == [SPEC]
    await held.owned()  # by another session, which reads the disk
    assert held.allocator.prepared.value == {}
    disk.clear()
    await held.claims.upkeep.sync_specs()
    assert held.specs() == []


async def test_a_write_that_was_given_up_may_come_late(
    monkeypatch: pytest.MonkeyPatch, held: Room
) -> None:
    """After the record is again as it was before that."""
    before = held.record.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", AsyncMock(side_effect=TimeoutError("no answer")))
        await held.unprepared()
    held.record.write_bytes(b"without it")
    await held.prepared()
    assert held.record.read_bytes() == before


async def test_a_directory_that_is_wiped_costs_nothing_that_is_known(held: Room) -> None:
    before = held.record.read_bytes()
    held.record.unlink()
    for _ in range(2):  # by the session, and by the driver
        held.allocator.disowned()  # as the lock has gone too
        await held.owned()
        assert held.allocator.prepared.value.keys() == {"uid-c"}
    await held.allocator.saved()
    assert held.record.read_bytes() == before


@pytest.mark.parametrize("record", [None, b""])
async def test_claims_are_found_however_late_the_kubelet_answers(
    held: Room, record: bytes | None
) -> None:
    held.record.unlink()
    if record is not None:
        held.record.write_bytes(record)
    held.start()
    await held.renewed(error="its socket is missing")
    held.known()
    await held.claims.upkeep.recover()
    for _ in range(3):
        held.says(uses=[("c", ZERO)])
    assert held.allocator.drivers_in_recovery.value == {"npu.furiosa.ai"}
    await held.claims.upkeep.sync_specs()
    with pytest.raises(RefusalError, match="missing from the agent's record"):
        await held.allocator.grant(NPU, devices(held.cards[0]))
    assert held.specs() == [SPEC]
    await held.claims.upkeep.recover()
    assert held.allocator.prepared.value.keys() == {"uid-c"}
    assert held.allocator.drivers_in_recovery.value == frozenset()


async def test_a_claim_that_ends_before_it_is_found_does_not_come_back(held: Room) -> None:
    """The record is lost, and the kubelet lists the claim for a moment yet."""
    held.record.unlink()
    held.start()
    await held.renewed(uses=[("c", ZERO)])
    held.known()
    await held.unprepared()
    await held.claims.upkeep.recover()
    assert held.allocator.prepared.value == {}
    assert not held.allocator.needs_recovery


@pytest.mark.parametrize("record", ["lost", "older"])
@pytest.mark.parametrize("error", [ErrorKind.UNREACHABLE, ErrorKind.NOT_FOUND])
async def test_no_device_is_handed_out_until_the_api_server_says_which_claim_is_in_use(
    held: Room, record: str, error: ErrorKind
) -> None:
    """By neither API."""
    first = await held.prepared()
    in_use = ZERO
    if record == "lost":
        held.record.unlink()
    else:
        in_use = ONE  # the record is that of an allocation before
    claim, held.api["team", "c"] = held.api["team", "c"], ApiError("no", kind=error)
    await held.restarted(uses=[("c", in_use)])
    held.claim("d", result(ZERO))
    held.claim("e", result(ONE))
    for name in ("d", "e"):
        assert "missing from the agent's record" in await held.prepared(name)
    with pytest.raises(RefusalError, match="missing from the agent's record"):
        await held.allocator.grant(NPU, [plain(held, 1)])
    held.api["team", "c"] = claim
    assert await held.prepared("c") == first  # the kubelet asks again
    assert HELD in await held.prepared("d")
    assert held.allocator.drivers_in_recovery.value == frozenset()


async def test_after_a_reboot_that_renumbers_the_card_has_other_nodes(held: Room) -> None:
    held.cards = (state(index=1, id_="WARBOY-0"), state(index=0, id_="WARBOY-1"))
    await held.restarted()
    assert await held.prepared() == answer(("npu", ZERO))
    assert variables(held) == {"uid-c-npu": "NPU_DEVNAME=npu1pe0-1"}
    # and what the claim held before the reboot is nobody's any more
    held.claim("d", result(ONE))
    assert await held.prepared("d") == answer(("npu", ONE), uid="uid-d")


async def test_two_devices_of_one_request_share_one_environment(room: Room) -> None:
    room.claim("c", result(ONE), result(ZERO))
    assert await room.prepared() == answer(("npu", ONE), ("npu", ZERO))
    edits = spec(room)["uid-c-npu"]
    assert edits["env"][0] == "NPU_DEVNAME=npu0pe0-1,npu1pe0-1"
    assert {"/dev/npu0", "/dev/npu1"} <= set(nodes(edits))


@pytest.mark.parametrize(
    ("containers", "single_container"),
    [
        ([("pod", "main")], True),
        ([("pod", "main"), ("other", "main")], True),  # two Pods that share a claim
        ([("pod", "main"), ("pod", "second")], False),  # each may name a request
        ([], False),  # the kubelet does not say
    ],
)
async def test_a_container_with_all_requests_has_the_variables_of_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    containers: list[tuple[str, str]],
    single_container: bool,
) -> None:
    room = Room(tmp_path)
    room.timing = PrepareTiming(containers=0.2)
    room.start()
    await room.owned()
    room.claim("c", result(ZERO, "a"), result(ONE, "b"))
    uses = [Assignment("team", pod, name, "", "", "c") for pod, name in containers]

    async def asked() -> None:
        room.now += 2.0
        room.kubelet.holdings.publish(Holdings(claim_uses=tuple(uses), asked_at=room.now))

    monkeypatch.setattr(room.kubelet, "ask", lambda: asyncio.ensure_future(asked()))
    await room.prepared()
    both = "NPU_DEVNAME=npu0pe0-1,npu1pe0-1"
    found = variables(room)
    assert found == {
        "uid-c-a": both if single_container else "NPU_DEVNAME=npu0pe0-1",
        "uid-c-b": both if single_container else "NPU_DEVNAME=npu1pe0-1",
    }
    assert "/dev/npu1" not in nodes(spec(room)["uid-c-a"])  # the runtime joins these itself
    uses.clear()  # a kubelet that has just started: what is known already stays
    await room.prepared()
    assert variables(room) == found


async def test_requests_of_one_container_share_the_variables(tmp_path: Path) -> None:
    """Of a claim that the scheduler made for extended resources; the last spec wins there."""
    cards = [state(index=index) for index in range(3)]
    room = Room(tmp_path, *cards)
    await room.owned()
    room.claim(
        "c",
        result(ZERO, "container-0-request-1"),
        result(ONE, "container-0-request-2"),
        result("npu-warboy-2", "container-1-request-0"),
    )
    await room.prepared()
    both = "NPU_DEVNAME=npu0pe0-1,npu1pe0-1"
    assert variables(room) == {
        "uid-c-container-0-request-1": both,
        "uid-c-container-0-request-2": both,
        "uid-c-container-1-request-0": "NPU_DEVNAME=npu2pe0-1",
    }
    assert "/dev/npu1" not in nodes(spec(room)["uid-c-container-0-request-1"])


async def test_only_results_of_our_driver_and_requests_by_their_base_names(room: Room) -> None:
    other = {"request": "nic", "driver": "nic.example.com", "pool": "x", "device": "eth0"}
    room.claim("c", other, result(ZERO, "any/warboy"))
    assert await room.prepared() == answer(("any", ZERO))
    assert list(spec(room)) == ["uid-c-any"]


GONE = "which this node does not have (any more)"


@pytest.mark.parametrize(
    ("results", "status", "reason"),
    [
        ([ZERO], {"allocation": None}, "no device of the driver npu.furiosa.ai is allocated to"),
        ([ZERO], {"reservedFor": []}, "is reserved for no Pod"),
        ([ZERO], {"allocation": {"devices": {"results": [{}]}}}, "results[0].request is missing"),
        ([ZERO], {"uid": "new"}, "has the UID new and not uid-c: it was deleted and made again"),
        ([ONE, "npu-of-another-life"], {}, GONE),
        ([ZERO], {"pool": "node-2"}, f"of the pool node-2, {GONE}"),
    ],
)
async def test_a_claim_that_cannot_be_prepared_is_refused_without_a_wait(
    patient: Room, results: list[str], status: dict[str, Any], reason: str
) -> None:
    """It is not waited for: no holder changes it."""
    pool = {"pool": status.pop("pool")} if "pool" in status else {}
    found = [result(device, f"r{at}", **pool) for at, device in enumerate(results)]
    patient.claim("c", *found, **status)
    patient.claim("d", result(ONE))
    both = await patient.claims.prepare([ref("c"), ref("d")])
    assert reason in str(both["uid-c"])
    assert both["uid-d"] == answer(("npu", ONE), uid="uid-d")
    assert patient.allocator.prepared.value.keys() == {"uid-d"}
    assert patient.specs() == ["furiosa.ai-claim-uid-d.json"]
    assert patient.claims.counts.prepares == {"prepared": 1, "refused": 1, "failed": 0}


@pytest.mark.parametrize("prepared", [False, True])
async def test_a_claim_that_cannot_be_read(room: Room, *, prepared: bool) -> None:
    if prepared:
        room.claim("c", result(ZERO))
        await room.prepared()
        del room.api["team", "c"]
    assert await room.prepared() == "ResourceClaim team/c cannot be read: c not found"
    assert room.claims.counts.prepares["failed"] == 1


@pytest.mark.parametrize(
    "path", ["metadata uid", "status", "status reservedFor", "status reservedFor 0 name"]
)
@pytest.mark.parametrize("odd", [None, 0, [[]], "\ud800", "../../x", "a\nb"])
async def test_a_malformed_claim_is_refused_in_words_that_can_be_sent(
    room: Room, path: str, odd: Any
) -> None:
    room.claim("c", result(ZERO))
    *inner, last = [int(key) if key.isdecimal() else key for key in path.split()]
    at: Any = room.api["team", "c"]
    for key in inner:
        at = at[key]
    at[last] = odd
    reason = await room.prepared()
    assert isinstance(reason, str)
    assert reason.encode()


def parameters(driver: str, source: str) -> dict[str, Any]:
    """As an allocation has them."""
    opaque = {"driver": driver, "parameters": {"kind": "GpuConfig"}}
    return {"source": source, "requests": ["npu"], "opaque": opaque}


async def test_parameters_for_us_are_refused(room: Room) -> None:
    ours = [parameters(DRIVER, "FromClaim"), parameters(DRIVER, "FromClass")]
    theirs = [parameters("gpu.example.com", "FromClaim")]
    allocation = {"devices": {"results": [result(ZERO)], "config": theirs + ours}}
    room.claim("c", allocation=allocation)
    assert "has opaque parameters (FromClaim, FromClass) for the driver" in await room.prepared()
    assert room.allocator.prepared.value == {}
    allocation["devices"]["config"] = theirs
    assert await room.prepared() == answer(("npu", ZERO))
    # What was prepared before is prepared again: its containers run.
    allocation["devices"]["config"] = ours
    assert await room.prepared() == answer(("npu", ZERO))


@pytest.fixture
async def patient(tmp_path: Path) -> Room:
    """A node that is ours, with claims that wait for as long as it takes."""
    room = Room(tmp_path)
    room.timing = PrepareTiming(holder_ends=600.0, containers=600.0)
    await room.restarted()
    return room


async def waits(room: Room, name: str) -> asyncio.Task[Any]:
    """A Prepare that was tried, and that waits."""
    asked = room.kubelet.asked
    preparing = asyncio.create_task(room.prepared(name))
    await until(lambda: room.kubelet.asked > asked)
    return preparing


async def test_a_claim_waits_for_the_claim_that_holds_its_device(patient: Room) -> None:
    """Its Pod was deleted by force, and is about to end. Nobody else waits meanwhile."""
    for name, device in (("c", ZERO), ("d", ZERO), ("e", ONE)):
        patient.claim(name, result(device))
    await patient.prepared("c")
    preparing = await waits(patient, "d")
    assert await patient.prepared("e") == answer(("npu", ONE), uid="uid-e")
    assert not preparing.done()
    await patient.unprepared("c")
    assert await preparing == answer(("npu", ZERO), uid="uid-d")
    assert patient.claims.counts.prepares == {"prepared": 3, "refused": 0, "failed": 0}


async def test_a_claim_waits_for_a_container_that_has_no_claim(patient: Room) -> None:
    patient.says("WARBOY-0")
    patient.claim("c", result(ZERO))
    preparing = await waits(patient, "c")
    for held in (["WARBOY-0"], [], []):  # two answers without it
        asked = patient.kubelet.asked
        assert not preparing.done()
        patient.says(*held)
        while not preparing.done() and patient.kubelet.asked == asked:  # until it is tried again
            await asyncio.sleep(0)
    assert await preparing == answer(("npu", ZERO))


async def test_while_the_kubelet_lists_no_pod_its_checkpoint_names_pods_without_a_claim(
    tmp_path: Path,
) -> None:
    """No record: the node moves to DRA while a Pod of the device plugin runs."""
    room = Room(tmp_path)
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"old"})}
    room.kubelet.node.alive = {"old"}
    await room.renewed(error="kubelet.sock is missing")
    room.known()
    room.claim("c", result(ZERO))
    room.claim("d", result(ONE))
    assert "the Pod with the UID old still holds its cores" in await room.prepared()
    assert isinstance(await room.prepared("d"), tuple)


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_claim_that_ends_while_it_waits_is_not_prepared(
    patient: Room, gives_up: bool
) -> None:
    """It is unprepared, or the kubelet no longer waits for its answer."""
    patient.claim("c", result(ZERO))
    patient.claim("d", result(ZERO))
    await patient.prepared("c")
    preparing = await waits(patient, "d")
    if gives_up:
        preparing.cancel()
        await asyncio.wait([preparing])
    else:
        await patient.unprepared("d")
    await patient.unprepared("c")
    await asyncio.sleep(0)
    assert gives_up or "was unprepared meanwhile" in await preparing
    assert patient.specs() == []
    assert patient.allocator.prepared.value == {}


async def test_an_administrator_is_let_in_and_holds_nothing(room: Room) -> None:
    room.claim("c", result(ZERO, "a"), result(ZERO, "b", adminAccess=True))
    room.claim("admin", result(ZERO, adminAccess=True))
    assert await room.prepared() == answer(("a", ZERO), ("b", ZERO))
    assert await room.prepared("admin") == answer(("npu", ZERO), uid="uid-admin")
    await room.unprepared("c")
    room.claim("d", result(ZERO, adminAccess=False))
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")
    room.kubelet.node.alive = {"pod-admin"}
    await room.unprepared("admin")
    assert room.allocator.states.value.orphans == {}


async def test_an_unhealthy_card_is_refused_unless_tolerated(tmp_path: Path) -> None:
    room = Room(tmp_path, state(health=HealthState.UNHEALTHY, reason="the driver says dead"))
    await room.owned()
    room.claim("c", result(ZERO))
    assert await room.prepared("c") == (
        "device npu-warboy-0 (npu0) is unhealthy: the driver says dead"
    )
    room.claim("other", result(ZERO, tolerations=[{"key": "npu.furiosa.ai/held"}]))
    assert "is unhealthy" in await room.prepared("other")
    room.claim("admin", result(ZERO, adminAccess=True))  # who may have come to see why
    assert await room.prepared("admin") == answer(("npu", ZERO), uid="uid-admin")
    room.claim("d", result(ZERO, tolerations=[{"key": "npu.furiosa.ai/unhealthy"}]))
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")
    await room.unprepared("d")
    room.claim("e", result(ZERO, tolerations=[{"operator": "Exists"}]))
    assert await room.prepared("e") == answer(("npu", ZERO), uid="uid-e")


async def test_a_card_that_becomes_unhealthy_is_prepared_again(held: Room) -> None:
    """After a restart of the kubelet, for a container that runs."""
    held.have(state(health=HealthState.UNHEALTHY, reason="dead"))
    assert await held.prepared() == answer(("npu", ZERO))


async def test_unprepare_needs_nothing(held: Room) -> None:
    held.cards = ()
    held.api.clear()
    await held.restarted()
    await held.unprepared("c")
    await held.unprepared("never heard of it")
    assert held.specs() == []
    assert json.loads(held.record.read_bytes())["prepared"] == {}
    assert held.claims.counts.unprepares["unprepared"] == 2


async def test_while_an_api_call_hangs_others_go_on(room: Room) -> None:
    room.claim("d", result(ZERO))

    async def hangs(name: str) -> None:
        if name == "c":
            await asyncio.Event().wait()

    room.fetched = hangs
    waiting = asyncio.create_task(room.prepared("c"))
    async with asyncio.timeout(10):
        assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")
    waiting.cancel()


async def test_a_prepared_claim_is_prepared_again_without_the_api_server(held: Room) -> None:
    held.api["team", "c"] = ApiError("unreachable", kind=ErrorKind.UNREACHABLE)
    await held.restarted(uses=[("c", ZERO)])
    assert await held.prepared() == answer(("npu", ZERO))


async def test_a_record_without_the_requests_of_devices_is_not_enough(held: Room) -> None:
    """It was rebuilt, and the claim has another device now."""
    held.record.unlink()
    held.claim("c", result(ONE))
    await held.restarted(uses=[("c", ZERO)])
    held.api["team", "c"] = ApiError("unreachable", kind=ErrorKind.UNREACHABLE)
    assert await held.prepared() == "ResourceClaim team/c cannot be read: unreachable"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Files that cannot be written are those whose names end so."""
    full, write = set[str](), files.replace

    async def replace(path: Path, content: bytes | None, **options: Any) -> bool:
        if path.name.endswith(tuple(full)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return await write(path, content, **options)

    monkeypatch.setattr(files, "replace", replace)
    return full


@pytest.mark.parametrize("what", [SPEC, RECORD])
async def test_a_disk_that_is_full_leaves_nothing_behind(
    room: Room, disk: set[str], what: str
) -> None:
    room.claim("c", result(ZERO))
    disk.add(what)
    reason = await room.prepared()
    assert reason.startswith("ResourceClaim team/c cannot be prepared: /")
    assert f"{what}: No space left on device" in reason
    assert room.allocator.prepared.value == {}
    disk.clear()
    await room.restarted()  # nor on the disk
    assert (room.allocator.prepared.value, room.specs()) == ({}, [])
    assert await room.prepared() == answer(("npu", ZERO))  # the kubelet asks again
    disk.add(what)
    room.claim("c", result(ZERO), reservedFor=reserved("pod-c", "later"))
    assert "No space left on device" in await room.prepared()
    assert room.allocator.prepared.value.keys() == {"uid-c"}  # its Pods run


async def test_no_claim_is_prepared_before_the_holders_are_known(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.timing = PrepareTiming(ready=0.01)
    room.start()
    room.claim("c", result(ZERO))
    assert "is still reading cards and who holds them" in await room.prepared()


@pytest.mark.parametrize("why", ["gone", "gone for a Node", "deallocated", "another"])
async def test_a_claim_that_is_gone_and_unused_is_dropped(held: Room, why: str) -> None:
    match why:
        case "gone":
            del held.api["team", "c"]
        case "gone for a Node":  # which is refused, as for a claim of another node
            held.api["team", "c"] = ApiError(
                "no relationship", kind=ErrorKind.UNRELATED, status=403
            )
        case "deallocated":
            held.claim("c", allocation=None, reservedFor=[])
        case "another":  # pod-resources names it, before it is prepared, without a device
            held.claim("c", result(ZERO), uid="new")
            held.says(uses=[("c", "")], driver="")
    await held.claims.upkeep.collect_garbage()
    assert held.allocator.prepared.value  # a Pod that was deleted by force may still end
    await held.claims.upkeep.collect_garbage()
    assert (held.allocator.prepared.value, held.specs()) == ({}, [])
    recorded = recover(Ledger(), read_record(held.directory), 0.0)
    assert not recorded.prepared  # the next agent does not know of it either


async def test_of_the_two_sweeps_that_end_a_claim_both_find_it_unused(held: Room) -> None:
    del held.api["team", "c"]
    held.says(uses=[("c", ZERO)])
    await held.claims.upkeep.collect_garbage()
    held.says()
    await held.claims.upkeep.collect_garbage()
    assert held.allocator.prepared.value.keys() == {"uid-c"}

    async def meanwhile(_: str) -> None:
        held.says(uses=[("c", ZERO)])

    held.fetched = meanwhile
    await held.claims.upkeep.collect_garbage()
    assert held.allocator.prepared.value.keys() == {"uid-c"}


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("used", ErrorKind.NOT_FOUND),
        ("silent", ErrorKind.UNRELATED),
        ("api error", ErrorKind.UNREACHABLE),
        ("no right", ErrorKind.FORBIDDEN),
        ("there", None),
    ],
)
async def test_a_claim_that_may_be_used_is_kept(
    held: Room, why: str, error: ErrorKind | None
) -> None:
    if error:
        held.api["team", "c"] = ApiError(why, kind=error)
    held.says(
        uses=[("c", ZERO)] if why == "used" else (), error="gone" if why == "silent" else None
    )
    for _ in range(3):
        await held.claims.upkeep.collect_garbage()
    assert held.allocator.prepared.value.keys() == {"uid-c"}
    assert held.specs() == [SPEC]


async def test_a_lost_record_is_rebuilt_although_there_is_a_new_one(tmp_path: Path) -> None:
    """The device plugin writes it as soon as the node is this agent's. Its Pods are known again."""
    room = Room(tmp_path)
    room.claim("c", result(ZERO))
    for _ in range(2):  # each part of the agent that serves the kubelet asks for it
        await room.renewed(uses=[("c", ZERO)])
        await room.allocator.saved()
        assert room.record.exists()
    room.known()
    await room.claims.upkeep.recover()
    assert room.allocator.prepared.value.keys() == {"uid-c"}
    room.kubelet.node.alive = {"pod-c"}
    await room.unprepared("c")
    assert list(room.allocator.states.value.orphans) == ["pod-c"]
    await room.claims.upkeep.recover()  # the kubelet may list it for a moment yet
    assert room.allocator.prepared.value == {}


async def test_a_pod_of_a_lost_record_that_the_api_server_has_forgotten_is_unidentified(
    held: Room,
) -> None:
    """It was deleted by force a moment ago, and the kubelet still lists it."""
    held.record.unlink()
    held.claim("c", result(ZERO), reservedFor=reserved("other"))
    await held.restarted(uses=[("c", ZERO)])
    (claim,) = held.allocator.prepared.value.values()
    assert claim.unidentified == ("pod-c",)
    await held.unprepared()
    held.claim("d", result(ZERO))
    assert "Pod team/pod-c (ResourceClaim team/c; its UID is not known" in await held.prepared("d")


async def test_a_claim_that_is_prepared_while_it_is_rebuilt_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, fetch = asyncio.Event(), asyncio.Event(), Room.fetch

    async def fails_late(room: Room, namespace: str, name: str) -> Mapping[str, Any]:
        if asked.is_set():
            return await fetch(room, namespace, name)
        asked.set()
        await go_on.wait()
        raise ApiError("unreachable", kind=ErrorKind.UNREACHABLE)

    monkeypatch.setattr(Room, "fetch", fails_late)
    room = Room(tmp_path)
    room.claim("c", result(ZERO))
    rebuilding = asyncio.create_task(room.owned(uses=[("c", ZERO)]))
    await asked.wait()
    assert await room.prepared("c") == answer(("npu", ZERO))
    go_on.set()
    await rebuilding
    assert room.allocator.prepared.value.keys() == {"uid-c"}


async def test_claims_of_other_drivers_are_not_rebuilt(room: Room) -> None:
    room.record.unlink(missing_ok=True)
    room.start()
    await room.renewed(uses=[("c", ZERO)], driver="gpu.example.com")
    room.known()
    await room.claims.upkeep.recover()
    assert room.allocator.prepared.value == {}


async def test_an_older_record_that_was_put_back_is_compared_with_claims_in_use(
    held: Room,
) -> None:
    """It has one claim with another card, and lacks the other claim."""
    older = held.record.read_bytes()
    await held.unprepared()
    held.claim("c", result(ONE))
    await held.prepared()
    held.claim("d", result(ZERO))
    first = await held.prepared("d")
    held.record.write_bytes(older)
    await held.restarted(uses=[("c", ONE), ("d", ZERO)])
    held.claim("e", result(ZERO))
    held.claim("f", result(ONE))
    assert "ResourceClaim team/d) still holds its cores" in await held.prepared("e")
    assert "ResourceClaim team/c) still holds its cores" in await held.prepared("f")
    assert await held.prepared("d") == first
    for name in ("c", "d"):
        await held.unprepared(name)
    assert await held.prepared("e") == answer(("npu", ZERO), uid="uid-e")


async def test_devices_of_an_earlier_allocation_are_no_reason_to_doubt_the_record(
    held: Room, caplog: pytest.LogCaptureFixture
) -> None:
    """A kubelet lists them too, once the claim was allocated anew and it was restarted."""
    held.claim("c", result(ONE))
    await held.prepared()
    held.claim("d", result(ZERO))
    await held.prepared("d")
    before = held.allocator.prepared.value
    await held.restarted(uses=[("c", ZERO), ("c", ONE), ("d", ZERO)])
    assert held.allocator.prepared.value == before
    assert "not recorded" not in caplog.text
    assert not held.allocator.needs_recovery


async def test_a_claim_that_the_kubelet_lists_until_it_unprepares_it(held: Room) -> None:
    """The agent ended before it had answered that it was unprepared."""
    await held.unprepared()
    await held.restarted(uses=[("c", ZERO)])
    assert held.allocator.prepared.value.keys() == {"uid-c"}
    await held.unprepared()  # it is asked again
    assert held.allocator.prepared.value == {}


async def test_a_call_that_the_kubelet_gives_up_is_made_to_its_end(
    monkeypatch: pytest.MonkeyPatch, room: Room
) -> None:
    """An unprepare waits for it."""
    write, go_on, records = files.replace, asyncio.Event(), list[bytes | None]()

    async def slow(path: Path, content: bytes | None, **options: Any) -> bool:
        if content:
            await go_on.wait()
        if path.name == RECORD:
            records.append(content)
        return await write(path, content, **options)

    monkeypatch.setattr(files, "replace", slow)
    room.claim("c", result(ZERO))
    preparing = asyncio.create_task(room.prepared())
    await until(lambda: room.allocator.prepared.value)
    preparing.cancel()
    await asyncio.wait([preparing])
    ending = asyncio.create_task(room.unprepared("c"))
    await asyncio.wait([ending], timeout=0.05)
    go_on.set()
    await ending
    assert [len(json.loads(record or b"")["prepared"]) for record in records] == [1, 0]
    assert room.claims.counts.prepares == {"prepared": 0, "refused": 0, "failed": 1}
    assert (room.allocator.prepared.value, room.specs()) == ({}, [])


async def test_an_agent_that_ends_leaves_claims_to_the_next_one(held: Room) -> None:
    held.claim("d", result(ONE))
    await held.allocator.end()
    assert "shutting down" in await held.prepared("d")
    assert "shutting down" in await held.claims.unprepare([ref("c")])
    await held.restarted()
    await held.unprepared("c")
    assert await held.prepared("d") == answer(("npu", ONE), uid="uid-d")


async def test_a_claim_that_another_agent_unprepared_meanwhile_is_not_prepared(room: Room) -> None:
    """In a rolling update the next agent starts, and waits, before the present one ends."""
    for name, device in (("c", ZERO), ("d", ONE)):
        room.claim(name, result(device))
        await room.prepared(name)
    present = room.claims
    room.start()
    await present.unprepare([ref("c")])
    await room.owned(uses=[("d", ONE)])
    assert room.allocator.prepared.value.keys() == {"uid-d"}
    room.claim("e", result(ZERO))
    assert await room.prepared("e") == answer(("npu", ZERO), uid="uid-e")


async def test_a_lost_record_is_rebuilt_once_the_cards_are_known(tmp_path: Path) -> None:
    """An agent that has just started has not seen its cards yet; their cores are in use."""
    room = Room(tmp_path)
    await room.renewed(uses=[("c", ZERO)])
    room.claim("c", result(ZERO))
    rebuilding = asyncio.create_task(room.claims.upkeep.recover())
    for _ in range(20):  # as far as it goes
        await asyncio.sleep(0)
    assert room.allocator.prepared.value == {}
    room.known()
    await rebuilding
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")


async def test_a_claim_that_is_unprepared_while_its_containers_run_keeps_its_cores(
    held: Room,
) -> None:
    """As a kubelet does with those of Pods that were deleted by force."""
    held.allocator_timing = allocator.AllocatorTiming(holder_ends=0.0)
    await held.restarted(uses=[("c", ZERO)])
    held.kubelet.node.alive = {"pod-c"}
    await held.unprepared()
    assert (held.allocator.prepared.value, held.specs()) == ({}, [])
    still = (
        "Pod team/pod-c (ResourceClaim team/c; not listed by the kubelet, but its containers "
        "still run)"
    )
    held.claim("d", result(ZERO))
    assert f"{still} still holds its cores" in await held.prepared("d")
    held.says()
    assert f"{still} still holds its cores" in await held.prepared("d")
    with pytest.raises(RefusalError, match="but its containers still run"):
        await held.allocator.grant(NPU, [plain(held)])
    held.claim("e", result(ONE))
    assert await held.prepared("e") == answer(("npu", ONE), uid="uid-e")
    held.kubelet.node.alive = set()
    held.says()
    assert await held.prepared("d") == answer(("npu", ZERO), uid="uid-d")


def joins(room: Room) -> None:
    """The kubelet lists the Pod ``later`` with the claim, which it does not prepare again."""
    use = Assignment("team", "later", "main", DRIVER, ZERO, "c")
    room.now += 2.0
    room.kubelet.holdings.publish(Holdings(asked_at=room.now, claim_uses=(use,)))
    room.allocator.reconcile()


@pytest.mark.parametrize("reserved_for", [["pod-c", "later"], ["pod-c"], []])
async def test_a_pod_that_joins_just_before_its_claim_ends_keeps_the_card(
    held: Room, reserved_for: list[str]
) -> None:
    """Both Pods are deleted by force, and `later` runs on; the API server may have forgotten it."""
    joins(held)
    held.claim("c", result(ZERO), reservedFor=reserved(*reserved_for))
    held.kubelet.node.alive = {"later"}
    held.says()
    await held.unprepared()
    held.claim("d", result(ZERO))
    reason = str(await held.prepared("d"))
    assert "Pod team/" in reason
    assert "run) still holds its cores" in reason
    held.kubelet.node.alive.clear()
    held.says()
    known = "later" in reserved_for
    assert isinstance(await held.prepared("d"), tuple) == known
    held.now += UNIDENTIFIED
    held.says()
    assert isinstance(await held.prepared("d"), tuple)


async def test_an_unprepare_does_not_wait_long_for_the_uid_of_a_pod(held: Room) -> None:
    held.timing = replace(held.timing, identify=0.01)
    await held.restarted(uses=[("c", ZERO)])
    joins(held)
    held.fetched = hangs
    await held.unprepared()
    assert list(held.allocator.states.value.orphans) == ["team/later"]


async def hangs(_: str) -> None:
    await asyncio.Event().wait()


async def test_a_prepare_that_waits_for_the_node_is_counted_from_the_call(held: Room) -> None:
    """Also if it is given up by then. A holder is waited for from the call, too."""
    held.claims.ready.publish(False)
    preparing = asyncio.create_task(held.claims.prepare([ref("d")]))
    await asyncio.wait([preparing], timeout=0.05)
    preparing.cancel()
    await asyncio.wait([preparing])
    assert held.claims.counts.prepares == {"prepared": 1, "refused": 0, "failed": 1}
    assert held.claims.counts.prepare_seconds.total >= 0.05


async def test_pods_that_come_to_share_a_claim_are_known(held: Room) -> None:
    """The kubelet has it prepared for the first one alone."""
    both = reserved("pod-c", "later")
    held.claim("c", result(ZERO), reservedFor=both)
    assert await held.claims.upkeep.identify_pods()
    (known,) = held.allocator.prepared.value.values()
    assert (known.pods, known.pod_uids) == (("pod-c",), ("pod-c",))
    joins(held)
    held.api["team", "c"] = ApiError("busy", kind=ErrorKind.UNREACHABLE)
    assert not await held.claims.upkeep.identify_pods()
    held.claim("c", result(ZERO), reservedFor=both)
    assert await held.claims.upkeep.identify_pods()
    (known,) = held.allocator.prepared.value.values()
    assert (known.pods, known.pod_uids) == (("pod-c", "later"), ("pod-c", "later"))
    (written,) = json.loads(held.record.read_bytes())["prepared"].values()
    assert written["pod_uids"] == ["pod-c", "later"]
    held.kubelet.node.alive = {"later"}
    await held.unprepared()
    assert list(held.allocator.states.value.orphans) == ["later"]


async def test_a_pod_for_which_a_claim_is_no_longer_reserved_is_known_while_it_lives(
    held: Room,
) -> None:
    held.kubelet.node.alive = {"pod-c"}
    held.claim("c", result(ZERO), reservedFor=reserved("later"))
    joins(held)
    assert await held.claims.upkeep.identify_pods()
    assert held.allocator.prepared.value["uid-c"].pod_uids == ("later",)
    assert list(held.allocator.states.value.orphans) == ["pod-c"]
    # What the kubelet has prepared again for the later one is its own.
    assert await held.prepared() == answer(("npu", ZERO))
    await held.unprepared()
    held.claim("d", result(ZERO))
    assert "its containers still run) still holds its cores" in await held.prepared("d")


async def test_a_claim_whose_pods_still_run_stays_while_another_ends(room: Room) -> None:
    """One of two Pods that share it was deleted by force; then the kubelet was restarted."""
    room.claim("c", result(ZERO), reservedFor=reserved("one", "other"))
    first = await room.prepared()
    room.kubelet.node.alive = {"one", "other"}
    room.claim("c", result(ZERO), reservedFor=reserved("other"))
    for _ in range(2):
        assert await room.prepared() == first
    await room.unprepared()
    assert set(room.allocator.states.value.orphans) == {"one", "other"}


async def test_a_claim_for_the_next_pod_waits_for_the_pod_before(patient: Room) -> None:
    """It has the same card again; nothing is asked anew before anything changes."""
    patient.claim("c", result(ZERO))
    await patient.prepared()
    patient.kubelet.node.alive = {"pod-c"}
    patient.claim("c", result(ZERO), reservedFor=reserved("next"))
    preparing = await waits(patient, "c")
    for _ in range(50):
        await asyncio.sleep(0)
    assert patient.kubelet.asked <= 3
    patient.kubelet.node.alive.clear()
    patient.says()
    assert await preparing == answer(("npu", ZERO))


# Parts of cards. That no core is given twice is the device plugin's test_exclusive.

CARD = "npu-rngd-0"


@pytest.fixture
async def cut(tmp_path: Path) -> Room:
    """A node that is ours, with a card that is offered in parts."""
    room = Room(tmp_path, state("rngd", 0))
    await room.owned()
    return room


async def part(room: Room, name: str, *cores: str) -> Any:
    """What the kubelet is answered for a claim of these cores of the card."""
    room.claim(name, *(result(f"{CARD}-cores-{each}") for each in cores))
    return await room.prepared(name)


async def test_a_container_is_given_its_part_and_nothing_of_the_others(cut: Room) -> None:
    """What is free is given, in whatever parts it was before."""
    for name, cores in (("a", "0-3"), ("b", "4-5"), ("c", "6"), ("d", "7")):
        (device,) = await part(cut, name, cores)
        assert device.device_name == f"{CARD}-cores-{cores}"
    edits = spec(cut, "furiosa.ai-claim-uid-b.json")["uid-b-npu"]
    assert edits["env"] == ["NPU_DEVNAME=npu0pe4-5", "FURIOSA_DEVICES=npu:0:4-5"]
    granted = {node for node in nodes(edits) if "pe" in node}
    assert granted == {"/dev/rngd/npu0pe4", "/dev/rngd/npu0pe4-5", "/dev/rngd/npu0pe5"}
    for name in ("b", "c"):
        await cut.unprepared(name)
    assert isinstance(await part(cut, "e", "4-7"), str)
    for name, cores in (("f", "4"), ("g", "5"), ("h", "6")):
        assert not isinstance(await part(cut, name, cores), str)


async def test_a_claim_may_not_have_a_core_twice(cut: Room) -> None:
    assert "has the same cores twice" in await part(cut, "a", "0-1", "1")
    assert cut.allocator.prepared.value == {}
    assert not isinstance(await part(cut, "a", "0-1", "2"), str)


async def test_a_part_that_is_no_longer_in_the_pool_keeps_its_card(cut: Room) -> None:
    """The scheduler counts the cores of the devices that it sees."""

    def held(listed: tuple[PoolDevice, ...]) -> set[str]:
        facts, names = cut.allocator.facts(), {device.name for device in listed}
        conflicts = facts.ledger.conflicts(facts.cards, without=names)
        return {device.name for device in listed if conflicts.against(None, device.device)}

    await part(cut, "a", "0-3")
    parts = cut.devices.value or ()
    whole = tuple(device for device in parts if not device.is_part)
    assert (held(parts), held(whole)) == (set(), {CARD})
    await cut.unprepared("a")
    assert held(whole) == set()
