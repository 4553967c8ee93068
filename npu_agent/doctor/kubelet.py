"""Who serves this node, what the kubelet knows of our devices, and who holds them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, DeviceName, Ledger, footprints_of
from npu_agent.core.offer import Device, Resource
from npu_agent.core.pool import devices_by_name
from npu_agent.core.trouble import TroubleKind, kind_of
from npu_agent.doctor.check import KUBELET, Finding, Lines, Unseen, note, ok, unknown, unused, wrong
from npu_agent.doctor.host import by_device_plugin, doubtful, offered, snapshot
from npu_agent.doctor.probe import directory, probe
from npu_agent.doctor.situation import Situation
from npu_agent.doctor.sockets import candidates, delete_plugin, list_plugins
from npu_agent.files import SIMULATION, content, regular
from npu_agent.kubelet.ownership import Owner, lock_path, owner_of
from npu_agent.kubelet.podresources import UnavailableError, fetch, socket_beside
from npu_agent.kubelet.pods import CGROUPS, CHECKPOINT

_LARGEST = 32 << 20
"""Bytes: it holds what each container was given."""


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "serving agent", _serving_agent(here)
    yield "pod-resources", _pod_resources(here)
    yield "cgroups", _cgroups(here)
    for resource in await by_device_plugin(here):
        yield f"resource {resource.name}", _resource(here, resource)


async def owner(here: Situation) -> Owner | None:
    """The npu-agent that serves this node; None: none does."""
    return await probe(lambda: _owner_of(here.directory))


def _owner_of(path: Path) -> Owner | None:
    """Who holds the lock. A shared one is asked for, for an instant, which nobody notices."""
    try:
        descriptor = regular(lock_path(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner_of(descriptor)
    finally:
        os.close(descriptor)
    return None


async def _serving_agent(here: Situation) -> Finding:
    serving = await here.see(owner)
    if serving is None:
        return note(
            "no npu-agent serves this node now",
            "normal before it is installed, or without cards; else check that its Pod runs here",
        )
    if serving.host is None:
        return unknown(f"{serving} serves this node", "ask again: it signs as soon as it has it")
    if here.in_pod and serving.host != here.hostname:
        return note(
            f"{serving}; the agent of this Pod ({here.hostname}) stands by",
            "normal during a rollout; else there are two DaemonSets: kubectl get daemonsets -A | "
            "grep npu-agent, and delete one",
        )
    return ok(str(serving))


async def held(here: Situation) -> tuple[Assignment, ...]:
    """What the kubelet's pod-resources API lists; by claims, the vendors' devices."""
    try:
        return await fetch(socket_beside(here.directory), here.drivers)
    except UnavailableError as error:
        raise Unseen(str(error), kind_of(error.__cause__ or error)) from error


async def _pod_resources(here: Situation) -> Finding:
    try:
        assignments = await here.see(held)
    except Unseen as unseen:
        if unseen.kind is TroubleKind.DENIED:
            raise
        return wrong(
            unseen.why,
            f"in a Pod, mount the host's {socket_beside(here.directory).parent} there "
            "(hostPath, readOnly); on the host, systemctl status kubelet",
            KUBELET,
        )
    ours = {resource.name for resource in here.resources}
    mine = [one for one in assignments if one.claim or one.resource in ours]
    seen = await here.see_or(snapshot, Snapshot())
    by_claim = devices_by_name(seen.cards)
    gone = [
        one
        for one in mine
        if not (one.device in by_claim if one.claim else _of_a_card(one.device, seen))
    ]
    if gone and seen.complete and not doubtful(seen):
        more = f", and {len(gone) - 1} more are" if len(gone) > 1 else ""
        return note(
            f"Pod {gone[0].namespace}/{gone[0].pod} holds {gone[0].device}, which is not here any "
            f"more{more}",
            "its card was drained or has failed under it: delete the Pod, or bring the card back",
        )
    # Several containers may use the device of one claim.
    count = len({(one.resource, one.device) for one in mine})
    return ok(f"answers: {count} of our devices are held by Pods")


async def _cgroups(here: Situation) -> Finding:
    """Whether it can be seen that containers run of a Pod that the kubelet does not list."""
    found = await probe(lambda: directory(here.host_root / CGROUPS))
    if found.there and not found.readable:
        raise Unseen(
            f"{found.path} ({found.owner}) cannot be read by uid {here.uid}", TroubleKind.DENIED
        )
    if found.there:
        return ok(f"{found.path} can be read")
    if await probe((here.host_root / SIMULATION).exists):
        return unused("a simulated host has none")
    return wrong(
        f"{found.path} is missing: the cards of a Pod that is deleted by force are given away "
        "while its containers run",
        f"mount the host's /{CGROUPS} at {found.path} (hostPath, readOnly), and name the directory "
        "above /sys by --host-root",
        here.apply_again() if here.in_pod else f"ls -ld {found.path}",
    )


def _of_a_card(id_: str, seen: Snapshot) -> bool:
    """Whether a card of this host can have a device of this ID, however it is cut."""
    return bool(footprints_of(id_, (state.card for state in seen.cards)))


async def registered(here: Situation) -> Mapping[str, frozenset[str]]:
    """For each resource, the healthy devices that the kubelet knows; it may know of none yet."""
    path = here.directory / CHECKPOINT
    raw = await probe(lambda: content(path, _LARGEST))
    return {} if raw is None else registered_in(raw, path)


def registered_in(checkpoint: bytes, path: Path) -> Mapping[str, frozenset[str]]:
    """The same, of the kubelet's checkpoint, which is the file at `path`.

    Raises:
        Unseen: it is none.
    """
    try:
        found = json.loads(checkpoint)["Data"]["RegisteredDevices"] or {}
        return {str(name): frozenset(map(str, ids or ())) for name, ids in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unseen(f"{path} is not as kubelets write it") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The IDs of devices that the device plugin can hand out; those in use among them."""

    sure: frozenset[str]
    claimed: frozenset[str]
    """Of cards that claims use as well. The agent keeps these back, unless all of those claims are
    for administrators, which pod-resources does not say."""


async def expected(here: Situation, resource: str, devices: tuple[Device, ...]) -> Expected:
    """What of `devices` can be handed out, computed as the agent does it."""
    assignments = await here.see_or(held, ())
    cards = {device.card for device in devices}
    by_plugin = [one for one in assignments if not one.claim]
    conflicts = (
        Ledger().with_answer(by_plugin, 0.0, cards=cards, resources=[resource]).conflicts(cards)
    )
    free = [
        device
        for device in devices
        if device.healthy and conflicts.against(DeviceName(resource, device.id), device) is None
    ]
    named = devices_by_name((await here.see_or(snapshot, Snapshot())).cards)
    claimed = {named[one.device][0] for one in assignments if one.claim and one.device in named}
    return Expected(
        sure=frozenset(device.id for device in free if device.card_id not in claimed),
        claimed=frozenset(device.id for device in free if device.card_id in claimed),
    )


async def _resource(here: Situation, resource: Resource) -> Finding:
    """Whether the kubelet has our devices under this resource, no others, and only there."""
    seen = await here.see(snapshot)
    known = await here.see(registered)
    devices = offered(here, resource, seen)
    ids = known.get(resource.name, frozenset())
    if strange := sorted(ids - {device.id for device in devices}):
        return await _strange(here, strange, seen)
    configured = {one.name for one in here.resources}
    cards = {device.card for device in devices}
    for other in sorted(known.keys() - configured):
        if both := sorted(id_ for id_ in known[other] if footprints_of(id_, cards)):
            return await _doubled(here, both[0], other)
    healthy = (await expected(here, resource.name, devices)).sure
    if missing := healthy - ids:
        detail = f"the kubelet knows {len(healthy) - len(missing)} of {len(healthy)} devices"
        if await here.see_or(owner, None):
            return wrong(
                detail,
                "the agent runs and is not registered, or follows another configuration: see "
                "readiness, and its log",
                here.agent_log,
            )
        return note(f"{detail}: no agent serves them")
    if not ids:
        return ok("no device to offer, and the kubelet knows of none")
    return ok(f"the kubelet knows {len(ids)}, all of them ours")


async def _strange(here: Situation, ids: list[str], seen: Snapshot) -> Finding:
    """The kubelet has devices of the resource that this agent does not offer."""
    if doubtful(seen):
        return unknown(
            f"the kubelet has {ids[0]}, which may be of a card that cannot be read",
            "fix the odd entry first",
        )
    ours = _of_a_card(ids[0], seen)
    how = "this configuration does not offer" if ours else "no card of this host has"
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    return wrong(
        f"the kubelet has device {ids[0]}{more} of it, which {how}: a second plugin registers the "
        f"same resource{await candidates(here)}",
        delete_plugin(
            here,
            "Or these are of an agent with another configuration: name its --config-file",
        ),
        list_plugins(here),
    )


async def _doubled(here: Situation, id_: str, resource: str) -> Finding:
    """The kubelet has a device of this agent as one of another resource, too."""
    return wrong(
        f"the kubelet has {id_} as {resource}, too: a second plugin offers the same "
        f"cards{await candidates(here)}",
        delete_plugin(
            here,
            "For five minutes after it has ended the kubelet remembers a plugin, as after a change "
            "of resourceName",
        ),
        list_plugins(here),
    )
