"""What is asked of a driver, in this order; each item says what came, or fails with it.

Where the promise comes from: the protocol's own words (k8s.io/kubelet, dra/v1 api.proto and
pluginregistration), what kubelets do (pkg/kubelet/cm/dra), and faults that drivers had, by number.
An item leaves the driver registered, and no claim prepared.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from npu_agent.kubelet.rpc import UnixChannel, apart
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1, v1beta1
from tests.conformance.world import CALL, NODE, PATIENCE, Answer, Claim, Device, World, brief
from tests.until import until

_CDI_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z][\w-]*)=([A-Za-z0-9][\w.:-]*)")
"""``vendor/class=name``: the CDI specification, "Kind" and "Device names"."""
_QUIET = 3.0
"""Seconds in which nothing may be written."""


class NotApplicable(Exception):  # noqa: N818 (no error)
    """The driver does not have what an item is about; its words say what."""


@dataclass(frozen=True)
class Item:
    name: str
    expected: str
    ask: Callable[[World], Awaitable[str]]
    """Returns what came.

    Raises:
        NotApplicable: there is nothing to judge.
        Exception: it fails.
    """


ITEMS: list[Item] = []


def item(expected: str) -> Callable[[Callable[[World], Awaitable[str]]], None]:
    def add(ask: Callable[[World], Awaitable[str]]) -> None:
        ITEMS.append(Item(ask.__name__.strip("_").replace("_", "-"), expected, ask))

    return add


# --- registration ---------------------------------------------------------------------------


@item("its registration socket answers as a DRAPlugin with the driver's name, within 30 s")
async def registers(world: World) -> str:
    instance = await world.registered()
    return f"{instance.socket.name}: {', '.join(await world.services())}"


@item("the newest version comes first: kubelets take the first that they know")
async def newest_version_first(world: World) -> str:
    named = [one for one in await world.services() if one.endswith(".DRAPlugin")]
    assert named == sorted(named, key=("v1.DRAPlugin", "v1beta1.DRAPlugin").index), named
    return ", ".join(named)


@item("each version that it names is served, at an absolute path")
async def versions_are_served(world: World) -> str:
    instance = await world.registered()
    services = await world.services()
    assert Path(instance.endpoint).is_absolute(), instance.endpoint
    for name, wire in (("v1", v1), ("v1beta1", v1beta1)):
        if f"{name}.DRAPlugin" in services:
            async with UnixChannel(Path(instance.endpoint)) as channel:
                request = wire.NodePrepareResourcesRequest()
                stub = wire.DraPluginStub(channel)
                await apart(stub.node_prepare_resources(request, timeout=CALL))
    return instance.endpoint


# --- what it offers -------------------------------------------------------------------------


@item("the API server has a complete pool of its devices, each name once")
async def publishes(world: World) -> str:
    slices = await world.complete_pool()
    names = [one["name"] for each in slices for one in each["spec"].get("devices", ())]
    assert names, "no device"
    assert len(set(names)) == len(names), names
    return f"{len(names)} devices in {len(slices)} slices"


@item("slices go with their Node: it is their owner, by its UID")
async def node_owns_slices(world: World) -> str:
    uid = (await world.api.ask("GET", f"/api/v1/nodes/{NODE}"))["metadata"]["uid"]
    for one in await world.complete_pool():
        owners = one["metadata"].get("ownerReferences", [])
        assert [each["uid"] for each in owners] == [uid], brief(owners)
    return f"Node {NODE}"


@item("a slice that is deleted comes back")
async def deleted_slice_comes_back(world: World) -> str:
    before = len(await world.complete_pool())
    await world.delete_slices()
    after = len(await world.complete_pool())
    assert before == after, (before, after)
    return f"{after} slices"


@item("nothing is written while nothing changes")
async def no_needless_writes(world: World) -> str:
    async def versions() -> list[str]:
        return [one["metadata"]["resourceVersion"] for one in await world.complete_pool()]

    before = await versions()
    await asyncio.sleep(_QUIET)
    after = await versions()
    assert before == after, f"resourceVersions {before}, then {after}"
    return f"{_QUIET:g} s without a write"


# --- prepare and unprepare ------------------------------------------------------------------


async def one_device(world: World, at: int = 0) -> Device:
    devices = await world.devices()
    if len(devices) <= at:
        raise NotApplicable(f"it offers {len(devices)} devices that can be had at the same time")
    return devices[at]


async def allocated(world: World, at: int = 0) -> Claim:
    return await world.claim(await one_device(world, at))


async def prepared(world: World, *claims: Claim) -> tuple[Answer, ...]:
    """The answers to one call, of which none is an error."""
    answers = await world.prepare(*claims)
    assert answers.keys() == {one.uid for one in claims}, f"answers for {sorted(answers)}"
    for answer in answers.values():
        assert not answer.error, answer.error
        assert answer.devices, "neither devices nor an error"
    return tuple(answers[one.uid] for one in claims)


async def unprepared(world: World, *claims: Claim) -> None:
    answers = await world.unprepare(*claims)
    assert answers.keys() == {one.uid for one in claims}, f"answers for {sorted(answers)}"
    for answer in answers.values():
        assert not answer.error, answer.error


@item("the answer has each allocated device with its pool, and the request that it is for")
async def prepares(world: World) -> str:
    device = await one_device(world)
    claim = await world.claim(device)
    (answer,) = await prepared(world, claim)
    assert [each[:3] for each in answer.devices] == [(device.pool, device.name, ("r0",))], answer
    await unprepared(world, claim)
    return brief(answer.devices)


@item("a second prepare of the same claim gives the same answer")
async def prepares_again(world: World) -> str:
    claim = await allocated(world)
    first, second = await prepared(world, claim), await prepared(world, claim)
    assert first == second, f"{first}, then {second}"
    await unprepared(world, claim)
    return "the same"


@item("two claims in one call are both prepared")
async def prepares_two_in_a_call(world: World) -> str:
    claims = await allocated(world), await allocated(world, 1)
    await prepared(world, *claims)
    await unprepared(world, *claims)
    return "both"


@item("two calls at the same time are both answered")
async def prepares_at_the_same_time(world: World) -> str:
    claims = await allocated(world), await allocated(world, 1)
    await asyncio.gather(*(prepared(world, one) for one in claims))
    await asyncio.gather(*(unprepared(world, one) for one in claims))
    return "both"


@item("of a claim that has devices of two drivers, its own are prepared, and no other")
async def leaves_other_drivers_devices(world: World) -> str:
    device = await one_device(world)
    claim = await world.claim(Device("theirs", "theirs-0", "other.example.com"), device)
    (answer,) = await prepared(world, claim)
    assert [each[:3] for each in answer.devices] == [(device.pool, device.name, ("r1",))], answer
    await unprepared(world, claim)
    return brief(answer.devices)


def named_in_specs(world: World, answer: Answer) -> str:
    """Checks that each CDI ID of an answer is a device of a valid spec."""
    if not answer.cdi_ids:
        raise NotApplicable("its answers have no CDI IDs")
    specs = world.specs()
    for one in sorted(answer.cdi_ids):
        match = _CDI_ID.fullmatch(one)
        assert match, f"{one!r} is no CDI ID"
        kind, name = match.groups()
        found = [
            (path, spec, device)
            for path, spec in specs.items()
            if isinstance(spec, dict) and spec.get("kind") == kind
            for device in spec.get("devices", ())
            if device.get("name") == name
        ]
        assert len(found) == 1, f"{one} is in {len(found)} specs of {[p.name for p in specs]}"
        path, spec, device = found[0]
        assert re.fullmatch(r"\d+\.\d+\.\d+", spec.get("cdiVersion", "")), path.name
        assert device.get("containerEdits"), f"{one} in {path.name} has no edits"
        assert path.stat().st_mode & 0o444, path.name
    return ", ".join(sorted(answer.cdi_ids))


@item("each CDI ID of an answer is a device of one valid spec")
async def cdi_specs_are_there(world: World) -> str:
    claim = await allocated(world)
    (answer,) = await prepared(world, claim)
    came = named_in_specs(world, answer)
    await unprepared(world, claim)
    return came


@item("unprepare removes the specs that prepare has made")
async def cdi_specs_go(world: World) -> str:
    before = world.specs().keys()
    claim = await allocated(world)
    await prepared(world, claim)
    made = world.specs().keys() - before
    if not made:
        raise NotApplicable("a prepare makes no file")
    await unprepared(world, claim)
    left = world.specs().keys() - before
    assert not left, f"left: {sorted(path.name for path in left)}"
    return ", ".join(sorted(path.name for path in made))


@item("a claim that was unprepared is prepared again, with the same answer")
async def prepares_after_unprepare(world: World) -> str:
    claim = await allocated(world)
    first = await prepared(world, claim)
    await unprepared(world, claim)
    second = await prepared(world, claim)
    assert first == second, f"{first}, then {second}"
    await unprepared(world, claim)
    return "the same"


@item("unprepare of a claim that it never knew is no error: else its Pod never ends")
async def unprepares_unknown(world: World) -> str:
    await unprepared(world, Claim("never", str(uuid4())))
    return "no error"


@item("a second unprepare is no error")
async def unprepares_again(world: World) -> str:
    claim = await allocated(world)
    await prepared(world, claim)
    await unprepared(world, claim)
    await unprepared(world, claim)
    return "no error"


@item("unprepare needs no ResourceClaim object: it may be gone")
async def unprepares_deleted(world: World) -> str:
    claim = await allocated(world)
    await prepared(world, claim)
    await world.api.ask("DELETE", claim.path)
    await unprepared(world, claim)
    return "no error"


# --- refusals -------------------------------------------------------------------------------


async def refused(world: World, bad: Claim, *, good: Claim | None = None) -> str:
    """The error for a claim; another one in the same call is prepared all the same."""
    good = good or await allocated(world, 1)
    answers = await world.prepare(bad, good)
    assert answers.keys() == {bad.uid, good.uid}, f"answers for {sorted(answers)}"
    error, devices = answers[bad.uid].error, answers[bad.uid].devices
    await unprepared(world, bad, good)
    assert not devices, f"prepared: {devices}"
    assert error, "no error"
    assert not answers[good.uid].error, f"the good claim: {answers[good.uid].error}"
    return error


@item("a claim without an allocation: an error for it alone")
async def refuses_unallocated(world: World) -> str:
    return await refused(world, await world.claim())


@item("a claim that does not exist: an error for it alone")
async def refuses_unknown(world: World) -> str:
    return await refused(world, Claim("never", str(uuid4())))


@item("a claim that was made again under its name: an error for the old UID alone")
async def refuses_another_uid(world: World) -> str:
    claim = await allocated(world)
    return await refused(world, Claim(claim.name, str(uuid4())))


@item("a device that it does not have: an error for that claim alone")
async def refuses_unknown_device(world: World) -> str:
    pool = (await one_device(world)).pool
    return await refused(world, await world.claim(Device(pool, "no-such-device", world.name)))


@item("a claim of another driver alone: an error, or an answer without devices")
async def prepares_nothing_of_another_driver(world: World) -> str:
    claim = await world.claim(Device("theirs", "theirs-0", "other.example.com"))
    answer = (await world.prepare(claim))[claim.uid]
    assert not answer.devices, brief(answer.devices)
    return answer.error or "no devices"


@item("a device of another prepared claim: an error (kubernetes/kubernetes#141471)")
async def refuses_held_device(world: World) -> str:
    device = await one_device(world)
    if device.shares:
        raise NotApplicable(f"{device.name} may be allocated several times")
    holder = await world.claim(device)
    await prepared(world, holder)
    second = await world.claim(device)
    answer = (await world.prepare(second))[second.uid]
    await unprepared(world, second, holder)
    assert answer.error, f"both have {device.name}"
    return answer.error


# --- restarts -------------------------------------------------------------------------------


@item(
    "after a restart of the kubelet, which deletes its slices: they are back, the claim as before"
)
async def survives_kubelet_restart(world: World) -> str:
    claim = await allocated(world)
    before = await prepared(world, claim)
    slices = len(await world.complete_pool())
    await world.manager.stop()
    await world.delete_slices()
    await world.manager.start()
    await world.registered()
    after = len(await world.complete_pool())
    assert after == slices, f"{after} slices of {slices}"
    assert await prepared(world, claim) == before
    await unprepared(world, claim)
    return f"{after} slices, and the same answer"


async def after_restart(world: World, number: signal.Signals) -> str:
    claim = await allocated(world)
    before = await prepared(world, claim)
    await world.restart(number)
    (after,) = await prepared(world, claim)
    assert (after,) == before, f"{before}, then {after}"
    if after.cdi_ids:
        named_in_specs(world, after)
    await unprepared(world, claim)
    return "the same answer"


@item("it ends within 30 s of SIGTERM; its next instance gives the same answer")
async def survives_its_restart(world: World) -> str:
    return await after_restart(world, signal.SIGTERM)


@item("killed, it leaves nothing that stops its next instance, which gives the same answer")
async def survives_being_killed(world: World) -> str:
    return await after_restart(world, signal.SIGKILL)


@item("a claim of the instance before is unprepared, and its specs go")
async def unprepares_what_its_predecessor_prepared(world: World) -> str:
    before = world.specs().keys()
    claim = await allocated(world)
    await prepared(world, claim)
    await world.restart()
    await unprepared(world, claim)
    left = world.specs().keys() - before
    assert not left, f"left: {sorted(path.name for path in left)}"
    return "no error, no file"


@item("after a reboot, which empties /var/run/cdi, prepare writes the specs again (#141433)")
async def survives_a_reboot(world: World) -> str:
    claim = await allocated(world)
    await prepared(world, claim)
    await world.end()
    for path in world.specs():
        path.unlink()
    world.start()
    (answer,) = await prepared(world, claim)
    came = named_in_specs(world, answer)
    await unprepared(world, claim)
    return came


@item("its registration socket is deleted: it makes another one, or ends to be started again")
async def notices_its_socket_gone(world: World) -> str:
    instance = await world.registered()
    instance.socket.unlink()
    await until(lambda: instance not in world.manager.instances.value)
    newer = await until(
        lambda: "it has ended" if not world.runs else bool(world.manager.instances.value),
        "another registration socket, or its end",
        deadline=PATIENCE,
    )
    return newer if isinstance(newer, str) else (await world.registered()).socket.name


# --- health ---------------------------------------------------------------------------------


async def reported(world: World) -> str:
    """Waits for a report on each device of the slices."""
    if not any("DRAResourceHealth" in one for one in await world.services()):
        raise NotApplicable("it names no DRAResourceHealth")
    wanted = {(world.name, one.pool, one.name) for one in await world.devices()}
    health = world.manager.health
    await until(
        lambda: wanted <= health.value.keys(),
        f"reports on {len(wanted)} devices",
        deadline=PATIENCE,
    )
    return ", ".join(sorted({health.value[one][0] for one in wanted}))


@item("its health stream opens, and its first message has each device")
async def reports_health(world: World) -> str:
    return await reported(world)


@item("a reader of its health that goes away does no harm: the next one gets each device")
async def reports_health_to_the_next_reader(world: World) -> str:
    await reported(world)
    await world.manager.restart()
    return await reported(world)


# --- the API server is away (last: it does not come back) -----------------------------------


@item("without an API server: unprepare is no error, prepare an error for the claim within 45 s")
async def bears_without_an_api_server(world: World) -> str:
    held, new = await allocated(world), await allocated(world, 1)
    await prepared(world, held)
    await asyncio.to_thread(world.api.stop)
    await unprepared(world, held)
    answer = (await world.prepare(new))[new.uid]
    assert answer.error, f"prepared: {answer.devices}"
    return answer.error
