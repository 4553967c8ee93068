"""Dynamic Resource Allocation: whether this node can do it, and what its drivers need."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from npu_agent.config.resources import asks_for
from npu_agent.core.pool import Effect
from npu_agent.doctor import classes
from npu_agent.doctor.check import Finding, Lines, Unseen, note, ok, unknown, unused, wrong
from npu_agent.doctor.cluster import own_node
from npu_agent.doctor.host import dra_support, may_use_dra
from npu_agent.doctor.kubelet import owner
from npu_agent.doctor.places import existing, writable
from npu_agent.doctor.probe import DEADLINE, directory, probe
from npu_agent.doctor.situation import Situation
from npu_agent.kube import Api, ApiError, Kind, resourceclaims, resourceslices
from npu_agent.kube.client import part
from npu_agent.kubelet.ownership import Owner
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.endpoint import PLUGINS, REGISTRY, made_by_us

_GROUP = "resource.k8s.io"
_POLICY = "npu-agent-own-slices"
_MOST_SLICES = 64
_COMPONENT = "add the component k8s/components/dra (Helm: dra.enabled)"


async def lines(here: Situation) -> Lines:
    """Of this subject; what a driver needs, only where this node may have one."""
    if not may_use_dra(here):
        yield "DRA", unused("allocation.api is device-plugin")
        return
    yield "DRA", _support(here)
    support = await here.see_or(dra_support, None)
    if support is not None and not support.available:
        return
    for driver in here.drivers:
        yield f"DRA registry of {driver}", _registry(here, driver)
        yield f"DRA directory of {driver}", _directory(here, driver)
        yield f"DRA slices of {driver}", _slices(here, driver)
        yield f"DRA features for {driver}", _features(here, driver)
        if here.config.dra.partitions:
            yield f"DRA counters for {driver}", _counters(here, driver)
        yield f"DeviceClass {driver}", _device_class(here, driver)
        yield f"resource names of {driver}", _resource_names(here, driver)
        yield f"policy {_POLICY}", _policy(here, driver)


async def _support(here: Situation) -> Finding:
    support = await here.see(dra_support)
    if support.available:
        return ok(support.reason)
    if asks_for(here.config, "dra", here.node_name):
        return wrong(
            f"impossible: {support.reason}",
            "update it, or set allocation.api to auto: the node then offers its cards by the "
            "device plugin",
            here.command("config show", *here.options),
        )
    return ok(f"allocation.api is auto, and that is the device plugin: {support.reason}")


@asynccontextmanager
async def _asked() -> AsyncIterator[Api]:
    """The API server, for the time of the context.

    Raises:
        Unseen: it does not answer, or refuses to.
    """
    api = Api(deadline=DEADLINE)
    try:
        yield api
    except ApiError as error:
        raise Unseen(error.what) from error
    finally:
        await api.close()


async def _registry(here: Situation, driver: str) -> Finding:
    """Whether the agent can register there, and whether another driver of its name does."""
    path = here.directory.parent / REGISTRY
    remedy = f"start the kubelet, which makes it; in a Pod, mount the host's there: {_COMPONENT}"
    found = writable(here, await probe(lambda: directory(path)), remedy)
    if found.remedy:
        return found
    names = await probe(lambda: sorted(each.name for each in path.iterdir()))
    theirs = [
        name
        for name in names
        if re.match(rf"{re.escape(driver)}(?![a-z0-9.])", name) and not made_by_us(name, driver)
    ]
    if theirs:
        return wrong(
            f"{', '.join(theirs)} in {path}: a second driver registers as {driver}",
            "the kubelet asks the one that came last: delete the vendor's DRA driver "
            "(kubectl get daemonsets -A | grep -i -e dra -e npu), or remove the socket if no "
            "process serves it",
            "kubectl get daemonsets -A | grep -i -e dra -e npu",
        )
    ours = sum(made_by_us(name, driver) for name in names)
    return ok(f"{found.detail}; {ours} of our sockets")


async def _directory(here: Situation, driver: str) -> Finding:
    path = here.directory.parent / PLUGINS / driver
    remedy = f"let the agent write the host's {path}, by the same path: {_COMPONENT}"
    place = await probe(lambda: directory(existing(path)))
    return writable(here, place, remedy)


async def _slices(here: Situation, driver: str) -> Finding:
    """Whether there are any, and whose."""
    node = _node(here)
    async with _asked() as api:
        found = (await resourceslices.read(api, node, driver)).slices
    ours = {slices.name(at, driver, node) for at in range(_MOST_SLICES)}
    if theirs := sorted(found.keys() - ours):
        return wrong(
            f"{theirs[0]} is not npu-agent's: a second driver publishes as {driver} on this node",
            f"delete that driver, and then: kubectl delete resourceslice {' '.join(theirs)}",
            "kubectl get daemonsets -A | grep -i -e dra -e npu",
        )
    if not found:
        if await here.see_or(owner, Owner()) is None:
            return note("none, and no npu-agent serves this node")
        return wrong(
            "none, though an agent serves this node",
            "it may have another configuration; else readiness and its log have the reason",
            here.agent_log,
        )
    devices = sum(len(each.get("spec", {}).get("devices") or ()) for each in found.values())
    return ok(f"{len(found)}, with {devices} device(s)")


def _node(here: Situation) -> str:
    if here.node_name is None:
        raise Unseen("NODE_NAME is not set")
    return here.node_name


async def _features(here: Situation, driver: str) -> Finding:
    """Whether the API server keeps taints: a dry run, which writes nothing."""
    tainted = {
        "name": "npu-doctor",
        "taints": [{"key": f"{driver}/unhealthy", "effect": Effect.NO_SCHEDULE.value}],
    }
    wanted = _slice(driver, _node(here), {"devices": [tainted]})
    async with _asked() as api:
        reply = await resourceslices.dry_run(api, wanted)
    if fields := slices.dropped(wanted, reply):
        return note(
            f"the API server drops {', '.join(fields)}: a feature gate is off there",
            "an unhealthy card is left out of the slices instead of tainted; DRADeviceTaints is "
            "on by default from Kubernetes 1.36 on",
        )
    return ok("the API server keeps taints of devices")


async def _counters(here: Situation, driver: str) -> Finding:
    """Whether the API server keeps what parts of cards take: a dry run, which writes nothing."""
    core = {"core-0": {"value": "1"}}
    consumed = {"counterSet": "npu-doctor", "counters": core}
    sets = [{"name": "npu-doctor", "counters": core}]
    tried = (
        {"sharedCounters": sets},
        {"devices": [{"name": "npu-doctor", "consumesCounters": [consumed]}]},
    )
    fields: set[str] = set()
    async with _asked() as api:
        for content in tried:
            wanted = _slice(driver, _node(here), content)
            fields |= {*slices.dropped(wanted, await resourceslices.dry_run(api, wanted))}
    if fields:
        return note(
            f"the API server drops {', '.join(sorted(fields))}: dra.partitions has no effect",
            "cards are offered whole; the feature gate DRAPartitionableDevices is on by default "
            "from Kubernetes 1.36 on",
        )
    return ok("the API server keeps counters: cards are cut on demand")


async def _device_class(here: Situation, driver: str) -> Finding:
    try:
        async with _asked() as api:
            await resourceclaims.device_class(api, driver)
    except Unseen as unseen:
        match unseen.__cause__:
            case ApiError(kind=Kind.NOT_FOUND):
                return wrong(
                    "missing: a claim that names it stays Pending",
                    "apply again what the agent was installed from, with the component "
                    "k8s/components/dra: kubectl apply -k OVERLAY; if that was Helm: helm upgrade "
                    f"npu-agent k8s/chart --namespace {here.namespace} --reset-then-reuse-values "
                    "--set dra.enabled=true",
                    "kubectl get daemonsets -A -l app.kubernetes.io/part-of=npu-agent "
                    "-L app.kubernetes.io/managed-by",
                )
            case ApiError(kind=Kind.FORBIDDEN):
                return _for_administrators(f"kubectl get deviceclass {driver}")
        raise
    return ok("there")


async def _resource_names(here: Situation, driver: str) -> Finding:
    """Whether Pods that ask by the names of resources are given cards."""
    try:
        async with _asked() as api:
            found = await resourceclaims.device_classes(api)
            every = (await resourceslices.read(api, None, driver)).slices.values()
    except Unseen as unseen:
        match unseen.__cause__:
            case ApiError(kind=Kind.FORBIDDEN):
                return _for_administrators("npu-agent doctor on the host, with a kubeconfig")
        raise
    return classes.judged(
        driver,
        [classes.device_class(each) for each in found],
        [device for each in every for device in each.get("spec", {}).get("devices") or ()],
        part(await own_node(here), "status", "allocatable"),
    )


def _for_administrators(how: str) -> Finding:
    return unused(f"the agent does not read it; an administrator may: {how}")


async def _policy(here: Situation, driver: str) -> Finding:
    """Whether a slice of another node is refused: a dry run, which writes nothing."""
    if not here.in_pod:
        return unused("it is about the agent's own account: ask in its Pod")
    wanted = _slice(driver, "npu-doctor.invalid", {"devices": []})
    try:
        async with _asked() as api:
            await resourceslices.dry_run(api, wanted)
    except Unseen as unseen:
        error = unseen.__cause__
        if not isinstance(error, ApiError) or error.kind is not Kind.FORBIDDEN:
            raise
        if _POLICY in error.what:
            return ok("this account may not write slices of other nodes")
        return unknown(f"refused, and not by that policy: {error.what}")
    return note(
        "this account may write slices of other nodes",
        f"{_COMPONENT}, which has the policy, and apply it: {here.apply_again()}; the policy's "
        "condition has to match this ServiceAccount",
    )


def _slice(driver: str, node: str, content: dict[str, Any]) -> dict[str, Any]:
    """One that is never written."""
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"npu-doctor-{driver}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            **content,
        },
    }
