"""Checks of the kubelet: the agent that serves, the devices it knows, and their holders."""

from __future__ import annotations

from collections.abc import Mapping

from npu_agent import typedjson
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, footprints_of
from npu_agent.core.offer import Resource
from npu_agent.core.trouble import TroubleKind, kind_of
from npu_agent.files import SIMULATION, content
from npu_agent.kubelet import pods
from npu_agent.kubelet.podresources import UnavailableError, fetch, socket_beside
from npu_agent.kubelet.pods import CGROUPS, CHECKPOINT
from npu_agent.people.doctor import offer
from npu_agent.people.doctor.agent import NO_REPORT, report
from npu_agent.people.doctor.check import (
    KUBELET,
    Check,
    Lines,
    Unknown,
    note,
    ok,
    unknown,
    unused,
    wrong,
)
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.directories import directory
from npu_agent.people.doctor.host import has_unread, snapshot, unreadable
from npu_agent.people.doctor.sockets import candidates, delete_plugin, list_plugins, owner
from npu_agent.text import listed

_LARGEST = 32 << 20


async def lines(context: Context) -> Lines:
    yield "serving agent", _serving_agent(context)
    yield "pod-resources", _pod_resources(context)
    yield "cgroups", _cgroups(context)
    for resource in await offer.by_device_plugin(context):
        yield f"resource {resource.name}", _resource(context, resource)


async def _serving_agent(context: Context) -> Check:
    serving = await context.probe(owner)
    if serving is None:
        return note(
            "no npu-agent serves this node now",
            "check that its Pod runs here, unless it is not installed yet or the node has no cards",
        )
    if serving.host is None:
        return unknown(
            f"{serving} serves this node",
            "run doctor again: the agent signs the lock as soon as it has it",
        )
    if context.in_pod and serving.host != context.hostname:
        return note(
            f"{serving}; the agent of this Pod ({context.hostname}) stands by",
            "wait if a rollout is under way; else delete one of two DaemonSets: kubectl get "
            "daemonsets -A | grep npu-agent",
        )
    return ok(str(serving))


async def held(context: Context) -> tuple[Assignment, ...]:
    try:
        return await fetch(socket_beside(context.directory), context.drivers)
    except UnavailableError as error:
        raise Unknown(str(error), kind_of(error.__cause__ or error)) from error


async def _pod_resources(context: Context) -> Check:
    try:
        assignments = await context.probe(held)
    except Unknown as error:
        if error.kind is TroubleKind.DENIED:
            raise
        return wrong(
            error.why,
            f"in a Pod, mount the host's {socket_beside(context.directory).parent} there "
            "(hostPath, readOnly); on the host, systemctl status kubelet",
            KUBELET,
        )
    ours = {resource.name for resource in context.resources}
    # Several containers may use the device of one claim.
    mine = {(one.resource, one.device) for one in assignments if one.claim or one.resource in ours}
    return ok(f"answers: {len(mine)} of our devices are held by Pods")


async def _cgroups(context: Context) -> Check:
    found = await context.in_thread(lambda: directory(context.host_root / CGROUPS))
    if found.there and not found.readable:
        raise unreadable(context, found)
    if found.there:
        return ok(f"{found.path} can be read")
    if await context.in_thread((context.host_root / SIMULATION).exists):
        return unused("a simulated host has none")
    return wrong(
        f"{found.path} is missing: the cards of a Pod that is deleted by force are given away "
        "while its containers run",
        f"mount the host's /{CGROUPS} at {found.path} (hostPath, readOnly), and name the directory "
        "above /sys by --host-root",
        context.apply_again() if context.in_pod else f"ls -ld {found.path}",
    )


async def registered(context: Context) -> Mapping[str, frozenset[str]]:
    """Returns the healthy devices that the kubelet knows, by resource."""
    path = context.directory / CHECKPOINT
    raw = await context.in_thread(lambda: content(path, _LARGEST))
    try:
        return {} if raw is None else pods.registered(raw)
    except typedjson.InvalidJsonError as error:
        raise Unknown(f"{path} is not in a format that kubelets write: {error}") from None


async def healthy(context: Context, resource: Resource) -> int:
    """How many devices can be handed out, by the agent's report or by the cards here."""
    found = (await context.probe_or(report, NO_REPORT)).healthy(resource.name)
    if found is not None:
        return found
    devices = offer.devices(context, resource, await context.probe(snapshot))
    return sum(device.healthy for device in devices)


async def _resource(context: Context, resource: Resource) -> Check:
    seen = await context.probe(snapshot)
    known = await context.probe(registered)
    devices = offer.devices(context, resource, seen)
    ids = known.get(resource.name, frozenset())
    if strange := sorted(ids - {device.id for device in devices}):
        return await _strange(context, strange, seen)
    configured = {one.name for one in context.resources}
    cards = {device.card for device in devices}
    for other in sorted(known.keys() - configured):
        if both := sorted(id_ for id_ in known[other] if footprints_of(id_, cards)):
            return await _twice(context, both[0], other)
    count = await healthy(context, resource)
    if len(ids) < count:
        detail = f"the kubelet knows {len(ids)} of {count} devices"
        if await context.probe_or(owner, None):
            return wrong(
                detail,
                "read the agent's log, and the line readiness: it is not registered, or has "
                "another configuration",
                context.agent_log,
            )
        return note(f"{detail}: no agent serves them")
    if not ids:
        return ok("no device to offer, and the kubelet knows of none")
    return ok(f"the kubelet knows {len(ids)}, all of them npu-agent's")


async def _strange(context: Context, ids: list[str], seen: Snapshot) -> Check:
    if has_unread(seen):
        return unknown(
            f"the kubelet has {ids[0]}, which may be of a card that cannot be read",
            "fix the odd entry first",
        )
    ours = footprints_of(ids[0], (state.card for state in seen.cards))
    how = "this configuration does not offer" if ours else "no card of this host has"
    return wrong(
        f"the kubelet has device {listed(ids, 1)} of it, which {how}: a second plugin registers "
        f"the same resource{await candidates(context)}",
        delete_plugin(
            context,
            "Or these are of an agent with another configuration: name its --config-file",
        ),
        list_plugins(context),
    )


async def _twice(context: Context, id_: str, resource: str) -> Check:
    return wrong(
        f"the kubelet has {id_} as {resource}, too: a second plugin offers the same "
        f"cards{await candidates(context)}",
        delete_plugin(
            context,
            "The kubelet remembers a plugin for five minutes after its end, for example after a "
            "change of resourceName",
        ),
        list_plugins(context),
    )
