"""Prepare and Unprepare: what the kubelet is answered, what is on the disk, and who is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.claim import ClaimUse, PreparedResult
from npu_agent.core.grant import RefusalError
from npu_agent.core.hardware import HealthState
from npu_agent.core.offer import Device
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kubelet.podresources import Holdings
from npu_agent.kubelet.pods import Pods
from npu_agent.kubelet.record import RECORD, recovered
from npu_agent.outputs.dra.claims import Timing
from tests.outputs.deviceplugin.helpers import devices, state
from tests.outputs.dra.room import NPU, Room, ref, result
from tests.until import until

ZERO, ONE = "npu-warboy-0", "npu-warboy-1"
SPEC = "furiosa.ai-claim-uid-c.json"
HELD = "Pod team/pod-c (ResourceClaim team/c) still holds its cores"


def answer(*found: tuple[str, str], uid: str = "uid-c") -> tuple[PreparedResult, ...]:
    """For each request and device."""
    return tuple(
        PreparedResult(
            requests=(request,),
            pool="node-1",
            device=device,
            cdi_ids=(f"furiosa.ai/claim={uid}-{request}",),
        )
        for request, device in found
    )


async def holding(directory: Path) -> Room:
    """A node on which a claim ``c`` is prepared."""
    room = Room(directory)
    await room.owned()
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


def plain(room: Room, index: int = 0) -> Device:
    """A card as the device plugin would hand it out."""
    return devices(*room.cards)[index]


async def test_a_claim_is_prepared(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    assert await room.prepared() == answer(("npu", ZERO))
    edits = spec(room)["uid-c-npu"]
    assert edits["env"] == ["NPU_DEVNAME=npu0pe0-1", "FURIOSA_DEVICES=npu:0:0-1"]
    assert nodes(edits) == [f"/dev/{node}" for node in plain(room).nodes]
    record = json.loads((tmp_path / RECORD).read_bytes())
    assert [(one["uid"], one["devices"][0]["device"]) for one in record["claims"]] == [
        ("uid-c", ZERO)
    ]
    assert room.claims.counts.prepares == {"prepared": 1, "refused": 0, "failed": 0}


async def test_again_is_the_same(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    before = (room.cdi_root / SPEC).read_bytes(), (tmp_path / RECORD).read_bytes()
    assert await room.prepared() == first
    assert ((room.cdi_root / SPEC).read_bytes(), (tmp_path / RECORD).read_bytes()) == before


async def test_after_a_reboot_the_spec_is_written_again(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    (room.cdi_root / SPEC).unlink()  # /var/run is a tmpfs
    await room.restarted(uses=[("c", ZERO)])
    assert await room.prepared() == first
    assert "uid-c-npu" in spec(room)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: shutil.rmtree(path.parent),
        lambda path: path.write_bytes(path.read_bytes()[:30]),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
    ],
    ids=["removed", "cut", "link"],
)
async def test_a_spec_that_somebody_removed_or_changed_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    room = await holding(tmp_path)
    before = (room.cdi_root / SPEC).read_bytes()
    harm(room.cdi_root / SPEC)
    del room.api["team", "c"]  # the API server is not needed
    await room.claims.sync_specs()
    assert (room.cdi_root / SPEC).read_bytes() == before
    await room.claims.sync_specs()
    assert caplog.text.count("written again") == 1
    await room.unprepared()
    await room.claims.sync_specs()
    assert room.specs() == []


async def test_no_spec_is_removed_while_it_is_unsure_what_is_prepared(tmp_path: Path) -> None:
    """The record is damaged, and the kubelet may not list all of its Pods yet."""
    room = await holding(tmp_path)
    unsure = recovered(replace(room.store.states.value, prepared={}), b"", room.clock())
    room.store.states.publish(unsure)
    room.store.rebuilt()
    await room.claims.sync_specs()
    assert room.specs() == [SPEC]
    for _ in range(2):
        room.says()
    await room.claims.sync_specs()
    assert room.specs() == []


async def test_a_claim_that_ends_meanwhile_gets_no_spec(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    (room.cdi_root / SPEC).unlink()
    async with room.claims._changing:
        ending = asyncio.create_task(room.unprepared())
        await asyncio.sleep(0)
        tidying = asyncio.create_task(room.claims.sync_specs())
        for _ in range(5):
            await asyncio.sleep(0)
    await ending
    await tidying
    assert room.specs() == []
    assert room.store.prepared.value == {}


async def test_a_spec_of_a_card_that_left_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = await holding(tmp_path)
    (room.cdi_root / SPEC).unlink()
    room.have()
    await room.claims.sync_specs()
    await room.claims.sync_specs()
    assert caplog.text.count("cannot be put right") == 1
    assert room.store.prepared.value.keys() == {"uid-c"}


async def test_a_spec_with_other_nodes_than_its_pods_were_given_is_not_written(
    tmp_path: Path,
) -> None:
    room = await holding(tmp_path)
    before = room.store.prepared.value
    (room.cdi_root / SPEC).unlink()
    room.have(state(index=5, id_=room.cards[0].id))
    await room.claims.sync_specs()
    assert room.specs() == []
    assert room.store.prepared.value == before  # the old nodes are still held


async def test_another_claim_of_its_name_does_not_keep_one_that_is_gone(tmp_path: Path) -> None:
    """pod-resources names a claim that is not prepared yet, without a driver and device."""
    room = await holding(tmp_path)
    room.claim("c", result(ZERO), uid="new")
    for _ in range(2):
        room.says(uses=[("c", "")], driver="")
        await room.claims.collect_garbage()
    assert room.store.prepared.value == {}


async def test_an_agent_that_ends_amid_a_prepare_or_unprepare_does_not_say_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    room.claim("d", result(ONE))
    await room.prepared("d")
    write = files.replace

    async def replace(path: Path, content: bytes | None, **how: Any) -> bool:
        if path.name != RECORD:
            room.store.disowned()  # as it is when it ends
        return await write(path, content, **how)

    monkeypatch.setattr(files, "replace", replace)
    assert "not this npu-agent's now" in await room.prepared()
    room.store._owner = True
    assert "not this npu-agent's now" in str((await room.claims.unprepare([ref("d")]))["uid-d"])
    monkeypatch.undo()
    await room.restarted()
    assert room.store.prepared.value.keys() == {"uid-d"}


async def test_claims_of_a_node_that_is_not_ours_are_left_alone(tmp_path: Path) -> None:
    """They are those of the agent that has it."""
    room = await holding(tmp_path)
    specs = room.specs()
    assert specs
    room.store.disowned()
    assert "not this npu-agent's now" in str((await room.claims.unprepare([ref("c")]))["uid-c"])
    assert room.specs() == specs
    assert room.store.prepared.value.keys() == {"uid-c"}


async def test_what_was_unprepared_does_not_come_back_when_another_session_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = await holding(tmp_path)
    with monkeypatch.context() as patched:
        full = AsyncMock(side_effect=OSError(errno.ENOSPC, "full"))
        patched.setattr(files, "replace", full)
        await room.unprepared()  # the disk still has it
        await room.owned()
    assert room.store.prepared.value == {}


async def test_a_write_that_was_given_up_may_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the record is again as it was before that."""
    room = await holding(tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", AsyncMock(side_effect=TimeoutError("no answer")))
        await room.unprepared()
    (tmp_path / RECORD).write_bytes(b"without it")
    await room.prepared()
    assert (tmp_path / RECORD).read_bytes() == before
    await room.store.save()


async def test_a_directory_that_is_wiped_costs_nothing_that_is_known(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    before = (tmp_path / RECORD).read_bytes()
    (tmp_path / RECORD).unlink()
    for _ in range(2):  # by the session, and by the driver
        room.store.disowned()  # as the lock has gone too
        await room.owned()
        assert room.store.prepared.value.keys() == {"uid-c"}
    await room.store.saved()
    assert (tmp_path / RECORD).read_bytes() == before


async def test_what_another_agent_unprepared_while_it_had_the_node_stays_so(tmp_path: Path) -> None:
    room, other = Room(tmp_path), Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    await room.prepared()
    room.store.disowned()
    await other.owned()
    await other.unprepared()
    written = (tmp_path / RECORD).read_bytes()
    room.store.unprepare("nothing")
    await room.store.save()
    await room.owned()
    assert room.store.prepared.value == {}
    assert (tmp_path / RECORD).read_bytes() == written


@pytest.mark.parametrize("record", [None, b""])
async def test_claims_are_found_however_late_the_kubelet_answers(
    tmp_path: Path, record: bytes | None
) -> None:
    room = await holding(tmp_path)
    (tmp_path / RECORD).unlink()
    if record is not None:
        (tmp_path / RECORD).write_bytes(record)
    room.start()
    renewing = asyncio.create_task(room.store.renew())
    await until(lambda: room.kubelet.asked)
    room.says(error="its socket is missing")
    await renewing
    room.known()
    await room.claims.recover()
    for _ in range(3):
        room.says(uses=[("c", ZERO)])
    assert room.store.unrecorded.value == {"npu.furiosa.ai"}
    await room.claims.sync_specs()
    with pytest.raises(RefusalError, match="not in the agent's record"):
        room.store.grant(NPU, devices(room.cards[0]))
    assert room.specs() == [SPEC]
    await room.claims.recover()
    assert room.store.prepared.value.keys() == {"uid-c"}
    assert room.store.unrecorded.value == frozenset()


async def test_a_claim_that_ends_before_it_is_found_does_not_come_back(tmp_path: Path) -> None:
    """The record is lost, and the kubelet lists the claim for a moment yet."""
    room = await holding(tmp_path)
    (tmp_path / RECORD).unlink()
    room.start()
    renewing = asyncio.create_task(room.store.renew())
    await until(lambda: room.kubelet.asked)
    room.says(uses=[("c", ZERO)])
    await renewing
    room.known()
    await room.unprepared()
    await room.claims.recover()
    assert room.store.prepared.value == {}
    assert not room.store.unchecked


@pytest.mark.parametrize("record", ["lost", "older"])
@pytest.mark.parametrize("error", [Kind.UNREACHABLE, Kind.NOT_FOUND])
async def test_nothing_is_handed_out_until_the_api_server_says_which_claim_is_in_use(
    tmp_path: Path, record: str, error: Kind
) -> None:
    """By neither API."""
    room = await holding(tmp_path)
    first = await room.prepared()
    in_use = ZERO
    if record == "lost":
        (tmp_path / RECORD).unlink()
    else:
        in_use = ONE  # the record is that of an allocation before
    claim, room.api["team", "c"] = room.api["team", "c"], ApiError("no", kind=error)
    await room.restarted(uses=[("c", in_use)])
    room.claim("d", result(ZERO))
    room.claim("e", result(ONE))
    for name in ("d", "e"):
        assert "not in the agent's record" in await room.prepared(name)
    with pytest.raises(RefusalError, match="not in the agent's record"):
        room.store.grant(NPU, [plain(room, 1)])
    room.api["team", "c"] = claim
    assert await room.prepared("c") == first  # the kubelet asks again
    assert HELD in await room.prepared("d")
    assert room.store.unrecorded.value == frozenset()


async def test_a_claim_that_is_deallocated_is_dropped_though_it_exists(tmp_path: Path) -> None:
    """That it was unprepared may be lost with a disk that was full."""
    room = await holding(tmp_path)
    room.claim("c", allocation=None, reservedFor=[])
    await room.claims.collect_garbage()
    assert room.store.prepared.value.keys() == {"uid-c"}
    room.says(uses=[("c", ZERO)])
    await room.claims.collect_garbage()
    assert room.store.prepared.value.keys() == {"uid-c"}
    room.says()
    await room.claims.collect_garbage()
    await room.claims.collect_garbage()
    assert room.store.prepared.value == {}


async def test_after_a_reboot_that_renumbers_the_card_has_other_nodes(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    room.cards = (state(index=1, id_="WARBOY-0"), state(index=0, id_="WARBOY-1"))
    await room.restarted()
    assert await room.prepared() == first
    assert spec(room)["uid-c-npu"]["env"][0] == "NPU_DEVNAME=npu1pe0-1"
    # and what the claim held before the reboot is nobody's any more
    room.claim("d", result(ONE))
    assert await room.prepared("d") == answer(("npu", ONE), uid="uid-d")


async def test_only_results_of_our_driver(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    other = {"request": "nic", "driver": "nic.example.com", "pool": "x", "device": "eth0"}
    room.claim("c", other, result(ZERO))
    assert await room.prepared() == answer(("npu", ZERO))
    room.claim("d", other)
    assert "no device of the driver npu.furiosa.ai" in await room.prepared("d")


async def test_requests_by_their_base_names(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, "any/warboy"))
    assert await room.prepared() == answer(("any", ZERO))
    assert list(spec(room)) == ["uid-c-any"]


async def test_two_devices_of_one_request_share_one_environment(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ONE), result(ZERO))
    assert await room.prepared() == answer(("npu", ONE), ("npu", ZERO))
    edits = spec(room)["uid-c-npu"]
    assert edits["env"][0] == "NPU_DEVNAME=npu0pe0-1,npu1pe0-1"
    assert {"/dev/npu0", "/dev/npu1"} <= set(nodes(edits))


async def test_each_request_has_its_own_devices(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, "a"), result(ONE, "b"))
    await room.prepared()
    assert spec(room)["uid-c-a"]["env"][0] == "NPU_DEVNAME=npu0pe0-1"
    assert spec(room)["uid-c-b"]["env"][0] == "NPU_DEVNAME=npu1pe0-1"
    assert "/dev/npu1" not in nodes(spec(room)["uid-c-a"])


@pytest.mark.parametrize(
    ("containers", "joined"),
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
    joined: bool,
) -> None:
    room = Room(tmp_path)
    room.timing = Timing(containers=0.2)
    room.start()
    await room.owned()
    room.claim("c", result(ZERO, "a"), result(ONE, "b"))
    uses = [ClaimUse("team", pod, name, "team", "c", "", "", "") for pod, name in containers]

    async def asked() -> None:
        room.now += 2.0
        room.kubelet.holdings.publish(Holdings(claim_uses=tuple(uses), asked_at=room.now))

    monkeypatch.setattr(room.kubelet, "ask", lambda: asyncio.ensure_future(asked()))
    await room.prepared()
    both = "NPU_DEVNAME=npu0pe0-1,npu1pe0-1"
    found = {name: edits["env"][0] for name, edits in spec(room).items()}
    assert found == {
        "uid-c-a": both if joined else "NPU_DEVNAME=npu0pe0-1",
        "uid-c-b": both if joined else "NPU_DEVNAME=npu1pe0-1",
    }
    assert "/dev/npu1" not in nodes(spec(room)["uid-c-a"])  # the runtime joins these itself
    uses.clear()  # a kubelet that has just started: what is known already stays
    await room.prepared()
    assert {name: edits["env"][0] for name, edits in spec(room).items()} == found


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
    found = {name: edits["env"][0] for name, edits in spec(room).items()}
    assert found == {
        "uid-c-container-0-request-1": both,
        "uid-c-container-0-request-2": both,
        "uid-c-container-1-request-0": "NPU_DEVNAME=npu2pe0-1",
    }
    assert "/dev/npu1" not in nodes(spec(room)["uid-c-container-0-request-1"])


async def test_a_claim_that_vanished(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    assert await room.prepared() == "ResourceClaim team/c cannot be read: c not found"
    assert room.claims.counts.prepares["failed"] == 1


async def test_another_claim_of_that_name(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO), uid="new")
    assert await room.prepared("c", uid="old") == (
        "ResourceClaim team/c has the UID new and not old: it was deleted and made again; "
        "delete the Pod"
    )


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"allocation": None}, "is not allocated"),
        ({"reservedFor": []}, "is reserved for no Pod"),
        ({"allocation": {"devices": {"results": [{"driver": "npu.furiosa.ai"}]}}}, "request is"),
        ({"allocation": {"devices": "npu0"}}, "status.allocation.devices: expected object"),
    ],
)
async def test_what_cannot_be_prepared(tmp_path: Path, status: dict[str, Any], reason: str) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO), **status)
    assert reason in await room.prepared()
    assert room.specs() == []


ODD: tuple[Any, ...] = (
    None,
    "",
    0,
    True,
    [],
    {},
    [[]],
    [{}],
    "\ud800",
    "../../x",
    "/",
    "a\nb",
    [None],
    10**400,
)


@pytest.mark.parametrize(
    "at",
    [
        (),
        ("metadata",),
        ("metadata", "uid"),
        ("metadata", "name"),
        ("status",),
        ("status", "allocation"),
        ("status", "allocation", "devices"),
        ("status", "allocation", "devices", "results"),
        ("status", "allocation", "devices", "results", 0),
        *(
            ("status", "allocation", "devices", "results", 0, key)
            for key in ("request", "driver", "pool", "device", "adminAccess", "tolerations")
        ),
        ("status", "allocation", "devices", "config"),
        ("status", "allocation", "devices", "config", 0),
        ("status", "allocation", "devices", "config", 0, "opaque"),
        ("status", "allocation", "devices", "config", 0, "requests"),
        ("status", "reservedFor"),
        ("status", "reservedFor", 0),
        ("status", "reservedFor", 0, "name"),
        ("status", "reservedFor", 0, "uid"),
    ],
    ids=str,
)
async def test_a_malformed_claim_fails_alone(tmp_path: Path, at: tuple[str | int, ...]) -> None:
    """Whatever the API server answers; and the reason can be sent to the kubelet."""
    room = Room(tmp_path)
    await room.owned()
    room.claim("d", result(ONE))
    for odd in ODD:
        room.claim("c", result(ZERO, tolerations=[{"key": "k"}], adminAccess=False))
        claims: Any = room.api
        claims["team", "c"]["status"]["allocation"]["devices"]["config"] = [parameters()]
        inner: Any = claims
        last: Any = ("team", "c")
        for key in at:
            inner, last = inner[last], key
        inner[last] = odd
        found = await room.claims.prepare([ref("c"), ref("d")])
        assert found["uid-d"] == answer(("npu", ONE), uid="uid-d")
        if isinstance(reason := found["uid-c"], str):
            assert reason.encode()
        else:
            assert reason == answer(("npu", ZERO))
        await room.unprepared("c")


def parameters(driver: str = "npu.furiosa.ai", **more: Any) -> dict[str, Any]:
    """As an allocation has them."""
    opaque = {"driver": driver, "parameters": {"kind": "GpuConfig"}}
    return {"source": "FromClaim", "requests": ["npu"], "opaque": opaque, **more}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ([parameters()], "FromClaim, for the request npu: remove them from spec.devices.config"),
        (
            [parameters(source="FromClass", requests=["a", "b"])],
            "FromClass, for the requests a, b: remove them from spec.config of the DeviceClass",
        ),
        ([parameters(requests=[])], "FromClaim, for it: "),
        (
            [parameters("gpu.example.com"), parameters(), parameters(source="FromClass")],
            "of its ResourceClaimTemplate; FromClass, for the request npu: ",
        ),
    ],
)
async def test_parameters_for_us_are_refused(
    tmp_path: Path, given: list[dict[str, Any]], where: str
) -> None:
    room = Room(tmp_path)
    await room.owned()
    allocation = {"devices": {"results": [result(ZERO)], "config": given}}
    room.claim("c", allocation=allocation)
    reason = await room.prepared()
    begins = "ResourceClaim team/c has opaque parameters for the driver npu.furiosa.ai"
    assert reason.startswith(begins)
    assert where in reason
    assert room.store.prepared.value == {}
    allocation["devices"]["config"] = [parameters("gpu.example.com")]
    assert await room.prepared() == answer(("npu", ZERO))
    # What was prepared before is prepared again: its containers run.
    allocation["devices"]["config"] = given
    assert await room.prepared() == answer(("npu", ZERO))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (result("npu-of-another-life"), "which this node does not have (any more)"),
        (result(ZERO) | {"pool": "node-2"}, "of the pool node-2, and this node's pool is node-1"),
    ],
)
async def test_devices_that_are_not_ours(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ONE), wrong)
    assert reason in await room.prepared()
    assert room.specs() == []
    assert room.store.prepared.value == {}


async def test_a_status_written_by_hand_that_has_a_device_twice(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, "a"), result(ZERO, "b"))
    assert "has the same cores twice" in await room.prepared()


async def test_a_claim_may_have_a_device_that_its_administrator_watches(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, "a"), result(ZERO, "b", adminAccess=True))
    assert await room.prepared() == answer(("a", ZERO), ("b", ZERO))


async def test_what_another_claim_holds_is_refused_until_that_one_ends(tmp_path: Path) -> None:
    """A Pod that was deleted by force: its device is allocated again while it still runs."""
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    room.claim("d", result(ZERO))
    await room.prepared("c")
    assert await room.prepared("d") == f"device 'WARBOY-0' (npu0) is not free: {HELD}"
    assert room.claims.counts.prepares["refused"] == 1
    del room.api["team", "c"]
    await room.unprepared("c")
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


async def test_so_is_it_after_a_restart_of_the_agent(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    await room.prepared("c")
    await room.restarted()
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")


async def test_what_a_container_holds_by_the_device_plugin_is_refused(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned("WARBOY-0")
    room.claim("c", result(ZERO))
    assert await room.prepared() == (
        "device 'WARBOY-0' (npu0) is not free: Pod team/train still holds its cores as WARBOY-0 "
        "of beta.furiosa.ai/npu"
    )


@pytest.fixture
def patient(tmp_path: Path) -> Room:
    """Claims that wait for as long as it takes."""
    room = Room(tmp_path)
    room.timing = Timing(holder_ends=600.0)
    room.start()
    return room


async def waits(room: Room, name: str) -> asyncio.Task[Any]:
    """A Prepare that was tried, and that waits."""
    asked = room.kubelet.asked
    preparing = asyncio.create_task(room.prepared(name))
    await until(lambda: room.kubelet.asked > asked)
    return preparing


async def test_a_claim_waits_for_the_one_that_holds_its_device(patient: Room) -> None:
    """Its Pod was deleted by force, and is about to end. Nobody else waits meanwhile."""
    await patient.owned()
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
    await patient.owned("WARBOY-0")
    patient.claim("c", result(ZERO))
    preparing = await waits(patient, "c")
    for held in (["WARBOY-0"], [], []):  # two answers without it
        asked = patient.kubelet.asked
        assert not preparing.done()
        patient.says(*held)
        while not preparing.done() and patient.kubelet.asked == asked:  # until it is tried again
            await asyncio.sleep(0)
    assert await preparing == answer(("npu", ZERO))


async def test_a_claim_waits_until_it_is_sure_that_no_container_is_left(patient: Room) -> None:
    """The agent, or the device plugin, has just ended, or has given its cards to DRA."""
    await patient.owned()
    patient.store.offering({NPU: [plain(patient)]})
    await patient.store.saved()
    await patient.restarted()
    assert patient.store.states.value.allocations  # one answer is not enough
    patient.claim("c", result(ZERO))
    preparing = await waits(patient, "c")
    patient.says()
    assert await preparing == answer(("npu", ZERO))


async def test_a_claim_that_ends_while_it_waits_is_not_prepared(patient: Room) -> None:
    await patient.owned()
    patient.claim("c", result(ZERO))
    patient.claim("d", result(ZERO))
    await patient.prepared("c")
    preparing = await waits(patient, "d")
    await patient.unprepared("d")
    await patient.unprepared("c")
    assert "was unprepared meanwhile" in await preparing
    assert patient.specs() == []
    assert patient.store.prepared.value == {}


async def test_nor_is_one_that_the_kubelet_no_longer_waits_for(patient: Room) -> None:
    await patient.owned()
    patient.claim("c", result(ZERO))
    patient.claim("d", result(ZERO))
    await patient.prepared("c")
    preparing = await waits(patient, "d")
    preparing.cancel()
    await asyncio.wait([preparing])
    await patient.unprepared("c")
    await asyncio.sleep(0)
    assert patient.specs() == []
    assert patient.store.prepared.value == {}


async def test_a_claim_does_not_wait_for_what_no_holder_changes(patient: Room) -> None:
    dead = state(index=1, health=HealthState.UNHEALTHY, reason="dead")
    patient.have(patient.cards[0], dead)
    await patient.owned()
    patient.claim("sick", result(ONE))
    patient.claim("gone", result("npu-of-another-life"))
    patient.claim("twice", result(ZERO, "a"), result(ZERO, "b"))
    assert "is unhealthy" in await patient.prepared("sick")
    assert "does not have (any more)" in await patient.prepared("gone")
    assert "has the same cores twice" in await patient.prepared("twice")
    assert not await patient.store.end()
    patient.claim("c", result(ZERO))
    assert "about to end" in await patient.prepared()


async def test_a_claim_waits_no_longer_than_it_may(patient: Room) -> None:
    patient.timing = Timing(holder_ends=0.05)
    patient.start()
    await patient.owned()
    patient.claim("c", result(ZERO))
    patient.claim("d", result(ZERO))
    await patient.prepared("c")
    assert HELD in await patient.prepared("d")
    await patient.unprepared("c")
    assert patient.store.prepared.value == {}


async def test_what_a_claim_holds_is_refused_to_the_device_plugin(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    room.store.update()
    with pytest.raises(RefusalError, match="ResourceClaim team/c"):
        room.store.grant(NPU, [plain(room)])
    room.store.grant(NPU, [plain(room, 1)])


async def test_an_administrator_is_let_in_beside_the_holder(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    room.claim("admin", result(ZERO, adminAccess=True))
    await room.prepared("c")
    assert await room.prepared("admin") == answer(("npu", ZERO), uid="uid-admin")
    await room.unprepared("c")
    room.claim("d", result(ZERO))  # the administrator holds nothing
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


async def test_who_is_no_administrator_holds_the_device(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, adminAccess=False))
    await room.prepared("c")
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")


async def test_a_sick_card_is_refused_unless_tolerated(tmp_path: Path) -> None:
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


async def test_a_card_that_falls_sick_is_prepared_again(tmp_path: Path) -> None:
    """After a restart of the kubelet, for a container that runs."""
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    room.have(state(health=HealthState.UNHEALTHY, reason="dead"))
    assert await room.prepared() == first


async def test_unprepare_needs_nothing(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    room.cards = ()
    room.api.clear()
    await room.restarted()
    await room.unprepared("c")
    await room.unprepared("never heard of it")
    assert room.specs() == []
    assert json.loads((tmp_path / RECORD).read_bytes())["claims"] == []
    assert room.claims.counts.unprepares["unprepared"] == 2


async def test_a_prepare_that_comes_after_its_unprepare(tmp_path: Path) -> None:
    """The kubelet has given up waiting, and its Pod has ended meanwhile."""
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    asked = asyncio.Event()
    fetch = room.fetch

    async def slow(namespace: str, name: str) -> Any:
        found = await fetch(namespace, name)
        asked.set()
        await asyncio.sleep(0.01)
        return found

    room.claims._fetch = slow
    preparing = asyncio.create_task(room.prepared())
    await asked.wait()
    await room.unprepared("c")
    assert "was unprepared meanwhile" in await preparing
    assert room.specs() == []


async def test_a_claim_is_prepared_for_one_pod_after_the_other(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    await room.unprepared()
    assert await room.prepared() == first
    assert room.specs() == [SPEC]


async def test_a_prepared_claim_that_is_gone_is_not_prepared_again(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    del room.api["team", "c"]
    assert "cannot be read: c not found" in await room.prepared()


async def test_two_claims_for_one_device_at_the_same_time(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    names = ["c", "d", "e"]
    for name in names:
        room.claim(name, result(ZERO))
    found = await room.claims.prepare([ref(name) for name in names])
    assert sum(not isinstance(one, str) for one in found.values()) == 1


@pytest.mark.parametrize("what", ["cdi", "record"])
async def test_what_cannot_be_written_of_several_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A record is of all of them, a spec of one."""
    room = Room(tmp_path)
    await room.owned()
    for name, device in (("c", ZERO), ("d", ONE)):
        room.claim(name, result(device))
    write = files.replace

    async def replace(path: Path, content: bytes | None, **how: Any) -> bool:
        if content and path.name == (SPEC if what == "cdi" else RECORD):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return await write(path, content, **how)

    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", replace)
        found = await room.claims.prepare([ref("c"), ref("d")])
    assert "No space left on device" in str(found["uid-c"])
    there = ["uid-d"] if what == "cdi" else []
    assert [uid for uid, one in found.items() if not isinstance(one, str)] == there
    assert list(room.store.prepared.value) == there
    assert room.specs() == [f"furiosa.ai-claim-{uid}.json" for uid in there]
    await room.restarted()
    assert list(room.store.prepared.value) == there


async def test_while_an_api_call_hangs_others_go_on(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("d", result(ZERO))
    fetch = room.fetch

    async def hangs(namespace: str, name: str) -> Any:
        if name == "c":
            await asyncio.Event().wait()
        return await fetch(namespace, name)

    room.claims._fetch = hangs
    waiting = asyncio.create_task(room.prepared("c"))
    async with asyncio.timeout(10):
        assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")
    waiting.cancel()


@pytest.mark.parametrize("status", [403, 409, 410, 429, 500])
async def test_errors_of_the_api_server_are_passed_on(tmp_path: Path, status: int) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.api["team", "c"] = ApiError(f"answered {status}", kind=Kind.SERVER, status=status)
    assert await room.prepared() == f"ResourceClaim team/c cannot be read: answered {status}"
    assert room.specs() == []


async def test_a_prepared_claim_is_prepared_again_without_the_api_server(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    first = await room.prepared()
    room.api["team", "c"] = ApiError("unreachable", kind=Kind.UNREACHABLE)
    await room.restarted(uses=[("c", ZERO)])
    assert await room.prepared() == first


@pytest.mark.parametrize("what", ["cdi", "record"])
async def test_a_disk_that_is_full_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    write = files.replace
    full = True

    async def replace(path: Path, content: bytes | None, **options: Any) -> None:
        if full and content and (path.name == RECORD) is (what == "record"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        await write(path, content, **options)

    monkeypatch.setattr(files, "replace", replace)
    reason = await room.prepared()
    assert "ResourceClaim team/c cannot be prepared" in reason
    assert "No space left on device" in reason
    assert str(room.cdi_root / SPEC if what == "cdi" else tmp_path / RECORD) in reason
    assert room.specs() == []
    assert room.store.prepared.value == {}
    full = False
    await room.restarted()  # nor on the disk
    room.claim("d", result(ZERO))
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


@pytest.mark.parametrize("what", ["cdi", "record"])
async def test_a_disk_that_has_room_again_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    write = files.replace

    async def replace(path: Path, content: bytes | None, **options: Any) -> None:
        if content and (path.name == RECORD) is (what == "record"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        await write(path, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", replace)
        assert "No space left on device" in await room.prepared()
    assert await room.prepared() == answer(("npu", ZERO))  # the kubelet asks again
    assert json.loads((tmp_path / RECORD).read_bytes())["claims"]
    assert room.specs() == [SPEC]


async def test_a_disk_that_is_full_ends_no_claim_that_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = await holding(tmp_path)

    async def replace(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", replace)
        assert "No space left on device" in await room.prepared()
    assert room.store.prepared.value.keys() == {"uid-c"}
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")


async def test_unprepare_on_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = await holding(tmp_path)

    async def replace(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", replace)
        await room.unprepared()
        assert room.store.prepared.value == {}
    assert room.specs() == [SPEC]
    await room.claims.sync_specs()
    assert room.specs() == []


async def test_before_it_is_known_who_holds_what_nothing_is_prepared(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    room.timing = Timing(ready=0.01)
    room.start()
    room.claim("c", result(ZERO))
    assert "does not know yet which cards this node has" in await room.prepared()


async def test_a_claim_that_is_gone_and_unused_is_dropped(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    del room.api["team", "c"]
    await room.claims.collect_garbage()
    assert room.store.prepared.value  # a Pod that was deleted by force may still end
    await room.claims.collect_garbage()
    assert room.store.prepared.value == {}
    assert room.specs() == []


async def test_of_the_two_sweeps_that_end_a_claim_both_find_it_unused(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    del room.api["team", "c"]
    room.says(uses=[("c", ZERO)])
    await room.claims.collect_garbage()
    room.says()
    await room.claims.collect_garbage()
    assert room.store.prepared.value.keys() == {"uid-c"}
    fetch = room.fetch

    async def meanwhile(namespace: str, name: str) -> Any:
        room.says(uses=[("c", ZERO)])
        return await fetch(namespace, name)

    room.claims._fetch = meanwhile
    await room.claims.collect_garbage()
    assert room.store.prepared.value.keys() == {"uid-c"}


async def test_another_claim_of_its_name_keeps_none_alive(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    room.claim("c", result(ONE), uid="new")
    await room.claims.collect_garbage()
    await room.claims.collect_garbage()
    assert room.store.prepared.value == {}


@pytest.mark.parametrize("why", ["used", "silent", "api error", "there"])
async def test_a_claim_that_may_be_used_is_kept(tmp_path: Path, why: str) -> None:
    room = await holding(tmp_path)
    if why != "there":
        del room.api["team", "c"]
    if why == "api error":
        room.api["team", "c"] = ApiError("unreachable", kind=Kind.UNREACHABLE)
    room.says(
        uses=[("c", ZERO)] if why == "used" else (), error="gone" if why == "silent" else None
    )
    for _ in range(3):
        await room.claims.collect_garbage()
    assert room.store.prepared.value.keys() == {"uid-c"}
    assert room.specs() == [SPEC]


@pytest.mark.parametrize("damage", [None, b"", b"{", b'{"version": 99}'])
async def test_a_lost_record_is_rebuilt(tmp_path: Path, damage: bytes | None) -> None:
    room = await holding(tmp_path)
    if damage is None:
        (tmp_path / RECORD).unlink()
    else:
        (tmp_path / RECORD).write_bytes(damage)
    await room.restarted(uses=[("c", ZERO)])
    room.says(uses=[("c", ZERO)])
    room.says(uses=[("c", ZERO)])
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")
    room.claim("e", result(ONE))
    assert await room.prepared("e") == answer(("npu", ONE), uid="uid-e")
    await room.unprepared("c")
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


async def test_a_lost_record_is_rebuilt_although_there_is_a_new_one(tmp_path: Path) -> None:
    """The device plugin writes it as soon as the node is this agent's."""
    room = Room(tmp_path)
    room.claim("c", result(ZERO))
    for _ in range(2):  # each part of the agent that serves the kubelet asks for it
        renewing = asyncio.create_task(room.store.renew())
        while not renewing.done():
            room.says(uses=[("c", ZERO)])
            await asyncio.sleep(0.001)
        await room.store.saved()
        assert (tmp_path / RECORD).exists()
    room.known()
    await room.claims.recover()
    assert room.store.prepared.value.keys() == {"uid-c"}
    await room.unprepared("c")
    await room.claims.recover()  # the kubelet may list it for a moment yet
    assert room.store.prepared.value == {}


async def test_a_claim_that_is_prepared_while_it_is_rebuilt_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, fetch = asyncio.Event(), asyncio.Event(), Room.fetch

    async def fails_late(room: Room, namespace: str, name: str) -> Mapping[str, Any]:
        if asked.is_set():
            return await fetch(room, namespace, name)
        asked.set()
        await go_on.wait()
        raise ApiError("unreachable", kind=Kind.UNREACHABLE)

    monkeypatch.setattr(Room, "fetch", fails_late)
    room = Room(tmp_path)
    room.claim("c", result(ZERO))
    rebuilding = asyncio.create_task(room.owned(uses=[("c", ZERO)]))
    await asked.wait()
    assert await room.prepared("c") == answer(("npu", ZERO))
    go_on.set()
    await rebuilding
    assert room.store.prepared.value.keys() == {"uid-c"}


async def test_nothing_is_rebuilt_of_other_drivers(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    (tmp_path / RECORD).unlink(missing_ok=True)
    room.start()
    renewing = asyncio.create_task(room.store.renew())
    while not renewing.done():
        room.says(uses=[("c", ZERO)], driver="gpu.example.com")
        await asyncio.sleep(0.001)
    room.known()
    await room.claims.recover()
    assert room.store.prepared.value == {}


async def test_an_older_record_that_was_put_back_is_compared_with_what_is_in_use(
    tmp_path: Path,
) -> None:
    """It has one claim with another card, and lacks the other claim."""
    room = await holding(tmp_path)
    older = (tmp_path / RECORD).read_bytes()
    await room.unprepared()
    room.claim("c", result(ONE))
    await room.prepared()
    room.claim("d", result(ZERO))
    first = await room.prepared("d")
    (tmp_path / RECORD).write_bytes(older)
    await room.restarted(uses=[("c", ONE), ("d", ZERO)])
    room.claim("e", result(ZERO))
    room.claim("f", result(ONE))
    assert "ResourceClaim team/d) still holds its cores" in await room.prepared("e")
    assert "ResourceClaim team/c) still holds its cores" in await room.prepared("f")
    assert await room.prepared("d") == first
    for name in ("c", "d"):
        await room.unprepared(name)
    assert await room.prepared("e") == answer(("npu", ZERO), uid="uid-e")


async def test_devices_of_an_earlier_allocation_are_no_reason_to_doubt_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kubelet lists them too, once the claim was allocated anew and it was restarted."""
    room = await holding(tmp_path)
    room.claim("c", result(ONE))
    await room.prepared()
    room.claim("d", result(ZERO))
    await room.prepared("d")
    before = room.store.prepared.value
    await room.restarted(uses=[("c", ZERO), ("c", ONE), ("d", ZERO)])
    assert room.store.prepared.value == before
    assert "in no record" not in caplog.text
    assert not room.store.unchecked


async def test_a_claim_that_the_kubelet_lists_until_it_unprepares_it(tmp_path: Path) -> None:
    """The agent ended before it had answered that it was unprepared."""
    room = await holding(tmp_path)
    await room.unprepared()
    await room.restarted(uses=[("c", ZERO)])
    assert room.store.prepared.value.keys() == {"uid-c"}
    await room.unprepared()  # it is asked again
    assert room.store.prepared.value == {}


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Files are not written until it is set."""
    write, event = files.replace, asyncio.Event()

    async def slow(path: Path, content: bytes | None, **options: Any) -> None:
        if content:
            await event.wait()
        await write(path, content, **options)

    monkeypatch.setattr(files, "replace", slow)
    return event


async def test_a_call_that_the_kubelet_gives_up_is_made_to_its_end(
    tmp_path: Path, go_on: asyncio.Event
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    preparing = asyncio.create_task(room.prepared())
    await until(lambda: room.store.prepared.value)
    preparing.cancel()
    await asyncio.wait([preparing])
    go_on.set()
    await until((tmp_path / RECORD).exists)
    assert json.loads((tmp_path / RECORD).read_bytes())["claims"]
    assert room.specs() == [SPEC]
    assert room.claims.counts.prepares == {"prepared": 0, "refused": 0, "failed": 1}
    await room.unprepared("c")
    assert room.specs() == []
    assert room.store.prepared.value == {}


async def test_an_unprepare_waits_for_the_prepare_under_way(
    tmp_path: Path, go_on: asyncio.Event
) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    preparing = asyncio.create_task(room.prepared())
    await until(lambda: room.store.prepared.value)
    ending = asyncio.create_task(room.unprepared("c"))
    await asyncio.wait([ending], timeout=0.05)
    go_on.set()
    await asyncio.wait([preparing, ending])
    assert room.specs() == []
    assert room.store.prepared.value == {}


async def test_an_agent_that_ends_leaves_claims_to_the_next_one(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO))
    room.claim("d", result(ONE))
    await room.prepared("c")
    before = room.store, room.claims
    assert not await room.store.end()
    assert "about to end" in await room.prepared("d")
    assert "about to end" in str((await room.claims.unprepare([ref("c")]))["uid-c"])
    await room.restarted()
    assert before != (room.store, room.claims)
    await room.unprepared("c")
    assert await room.prepared("d") == answer(("npu", ONE), uid="uid-d")


async def test_what_another_agent_unprepared_meanwhile_is_not_prepared(tmp_path: Path) -> None:
    """In a rolling update the next agent starts, and waits, before the present one ends."""
    room = Room(tmp_path)
    await room.owned()
    for name, device in (("c", ZERO), ("d", ONE)):
        room.claim(name, result(device))
        await room.prepared(name)
    present = room.claims
    room.start()
    await present.unprepare([ref("c")])
    await room.owned(uses=[("d", ONE)])
    assert room.store.prepared.value.keys() == {"uid-d"}
    room.claim("e", result(ZERO))
    assert await room.prepared("e") == answer(("npu", ZERO), uid="uid-e")


async def test_a_lost_record_is_rebuilt_once_the_cards_are_known(tmp_path: Path) -> None:
    """An agent that has just started has not seen its cards yet; their cores are in use."""
    room = Room(tmp_path)
    renewing = asyncio.create_task(room.store.renew())
    while not renewing.done():
        room.says(uses=[("c", ZERO)])
        await asyncio.sleep(0.001)
    room.claim("c", result(ZERO))
    rebuilding = asyncio.create_task(room.claims.recover())
    for _ in range(20):  # as far as it goes
        await asyncio.sleep(0)
    assert room.store.prepared.value == {}
    room.known()
    await rebuilding
    room.claim("d", result(ZERO))
    assert HELD in await room.prepared("d")


async def test_a_claim_that_is_unprepared_while_its_containers_run_keeps_its_cores(
    tmp_path: Path,
) -> None:
    """As a kubelet does with those of Pods that were deleted by force."""
    room = await holding(tmp_path)
    room.kubelet.node.alive = {"pod-c"}
    await room.unprepared()
    assert (room.store.prepared.value, room.specs()) == ({}, [])
    still = (
        "Pod team/pod-c (ResourceClaim team/c; not listed by the kubelet, but its containers run)"
    )
    room.claim("d", result(ZERO))
    assert f"{still} still holds its cores" in await room.prepared("d")
    room.says()
    assert f"{still} still holds its cores" in await room.prepared("d")
    with pytest.raises(RefusalError, match="but its containers run"):
        room.store.grant(NPU, [plain(room)])
    room.claim("e", result(ONE))
    assert await room.prepared("e") == answer(("npu", ONE), uid="uid-e")
    room.kubelet.node.alive = set()
    room.says()
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


async def test_a_claim_that_is_unprepared_keeps_its_cores_while_cgroups_cannot_be_read(
    tmp_path: Path,
) -> None:
    room = await holding(tmp_path)
    room.kubelet.pods = Pods(tmp_path, tmp_path)
    cgroups = tmp_path / "sys/fs/cgroup"
    cgroups.parent.mkdir(parents=True)
    cgroups.touch()
    await room.unprepared()
    room.claim("d", result(ZERO))
    assert "not listed by the kubelet, but its containers run" in await room.prepared("d")
    room.says()
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")


async def test_that_is_kept_for_the_next_agent(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    await room.restarted(uses=[("c", ZERO)])  # it knows the claim's Pod from the record
    room.kubelet.node.alive = {"pod-c"}
    await room.unprepared()
    record = json.loads((tmp_path / RECORD).read_bytes())
    assert (record["claims"], list(record["ending"])) == ([], ["pod-c"])


async def test_an_administrators_claim_keeps_nobody_waiting(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO, adminAccess=True))
    await room.prepared()
    room.kubelet.node.alive = {"pod-c"}
    await room.unprepared()
    assert room.store.states.value.orphans == {}


async def test_the_pods_of_a_claim_that_was_found_again_are_known(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    (tmp_path / RECORD).unlink()
    await room.restarted(uses=[("c", ZERO)])
    room.kubelet.node.alive = {"pod-c"}
    await room.unprepared()
    assert list(room.store.states.value.orphans) == ["pod-c"]


async def test_pods_that_come_to_share_a_claim_are_known(tmp_path: Path) -> None:
    """The kubelet has it prepared for the first one alone."""
    room = await holding(tmp_path)
    both = [{"resource": "pods", "name": f"pod-{name}", "uid": name} for name in ("c", "later")]
    room.claim("c", result(ZERO), reservedFor=both)
    await room.claims.refresh_consumers()
    (known,) = room.store.prepared.value.values()
    assert (known.pods, known.pod_uids) == (("pod-c",), ("pod-c",))
    use = ClaimUse("team", "pod-later", "main", "team", "c", "npu.furiosa.ai", "node-1", ZERO)
    room.kubelet.holdings.publish(Holdings(asked_at=room.now, claim_uses=(use,)))
    room.api["team", "c"] = ApiError("busy", kind=Kind.UNREACHABLE)
    await room.claims.refresh_consumers()
    room.claim("c", result(ZERO), reservedFor=both)
    await room.claims.refresh_consumers()
    (known,) = room.store.prepared.value.values()
    assert (known.pods, known.pod_uids) == (("pod-c", "pod-later"), ("c", "later"))
    assert json.loads((tmp_path / RECORD).read_bytes())["claims"][0]["podUIDs"][-1] == "later"
    room.kubelet.node.alive = {"later"}
    await room.unprepared()
    assert list(room.store.states.value.orphans) == ["later"]


async def test_a_pod_for_which_a_claim_is_no_longer_reserved_is_known_while_it_lives(
    tmp_path: Path,
) -> None:
    room = await holding(tmp_path)
    room.kubelet.node.alive = {"pod-c"}
    later = [{"resource": "pods", "name": "pod-later", "uid": "later"}]
    room.claim("c", result(ZERO), reservedFor=later)
    use = ClaimUse("team", "pod-later", "main", "team", "c", "npu.furiosa.ai", "node-1", ZERO)
    room.kubelet.holdings.publish(Holdings(asked_at=room.now, claim_uses=(use,)))
    await room.claims.refresh_consumers()
    assert room.store.prepared.value["uid-c"].pod_uids == ("later",)
    assert list(room.store.states.value.orphans) == ["pod-c"]
    # What the kubelet has prepared again for the later one is its own.
    assert await room.prepared() == answer(("npu", ZERO))
    await room.unprepared()
    room.claim("d", result(ZERO))
    assert "its containers run) still holds its cores" in await room.prepared("d")


def reserved(*pods: str) -> list[dict[str, str]]:
    return [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]


async def test_a_claim_that_is_allocated_anew_leaves_its_card_to_the_pod_before(
    tmp_path: Path,
) -> None:
    """The kubelet was restarted, and the Pod before was deleted by force."""
    room = await holding(tmp_path)
    room.kubelet.node.alive = {"pod-c"}
    room.claim("c", result(ONE), reservedFor=reserved("next"))
    assert await room.prepared() == answer(("npu", ONE))
    room.claim("d", result(ZERO))
    assert "its containers run) still holds its cores" in await room.prepared("d")
    room.start()  # the next agent
    room.kubelet.node.alive = {"pod-c"}
    await room.owned()
    assert "its containers run) still holds its cores" in await room.prepared("d")
    room.kubelet.node.alive = {"next"}
    room.says()
    assert await room.prepared("d") == answer(("npu", ZERO), uid="uid-d")
    assert await room.prepared() == answer(("npu", ONE))


async def test_a_claim_for_the_next_pod_waits_for_the_pod_before(tmp_path: Path) -> None:
    """It has the same card again."""
    room = await holding(tmp_path)
    room.kubelet.node.alive = {"pod-c"}
    room.claim("c", result(ZERO), reservedFor=reserved("next"))
    for _ in range(2):
        assert "its containers run) still holds its cores" in await room.prepared()
    await room.unprepared()
    assert list(room.store.states.value.orphans) == ["pod-c"]
    room.kubelet.node.alive.clear()
    room.says()
    assert await room.prepared() == answer(("npu", ZERO))


async def test_a_claim_whose_pods_still_run_is_theirs_beside_one_that_ends(tmp_path: Path) -> None:
    """One of two Pods that share it was deleted by force; then the kubelet was restarted."""
    room = Room(tmp_path)
    await room.owned()
    room.claim("c", result(ZERO), reservedFor=reserved("one", "other"))
    first = await room.prepared()
    room.kubelet.node.alive = {"one", "other"}
    room.claim("c", result(ZERO), reservedFor=reserved("other"))
    for _ in range(2):
        assert await room.prepared() == first
    await room.unprepared()
    assert set(room.store.states.value.orphans) == {"one", "other"}


async def test_a_refusal_is_not_repeated_before_anything_changes(patient: Room) -> None:
    await patient.owned()
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


async def test_the_pods_of_a_claim_that_an_older_agent_prepared_are_found(tmp_path: Path) -> None:
    room = await holding(tmp_path)
    record = json.loads((tmp_path / RECORD).read_bytes())
    del record["claims"][0]["podUIDs"]
    (tmp_path / RECORD).write_text(json.dumps(record))
    await room.restarted(uses=[("c", ZERO)])
    await room.claims.refresh_consumers()
    (known,) = room.store.prepared.value.values()
    assert known.pod_uids == ("pod-c",)
