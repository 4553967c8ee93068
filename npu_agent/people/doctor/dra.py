"""Checks of Dynamic Resource Allocation: support by this node, and needs of its drivers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from npu_agent.config.resources import asks_for
from npu_agent.core.pool import Effect
from npu_agent.core.state import COUNTERS
from npu_agent.kube import ApiError, Kind, resourceclaims, resourceslices
from npu_agent.kube.objects import DeviceClass
from npu_agent.kubelet.ownership import Owner
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.endpoint import PLUGINS, REGISTRY, made_by_us
from npu_agent.people.doctor import offer
from npu_agent.people.doctor.agent import report
from npu_agent.people.doctor.check import Check, Lines, Unknown, note, ok, unknown, unused, wrong
from npu_agent.people.doctor.cluster import own_node
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.directories import directory, existing, writable
from npu_agent.people.doctor.offer import node_name
from npu_agent.people.doctor.sockets import owner

_GROUP = "resource.k8s.io"
_POLICY = "npu-agent-own-slices"
_MOST_SLICES = 64
_CLASSES = (
    "kubectl get deviceclasses --sort-by=.metadata.creationTimestamp "
    "-o custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName"
)
_COMPONENT = "add the component k8s/components/dra (Helm: dra.enabled)"


async def lines(context: Context) -> Lines:
    if not offer.may_use_dra(context):
        yield "DRA", unused("allocation.api is device-plugin")
        return
    yield "DRA", _support(context)
    support = await context.probe_or(offer.dra_support, None)
    if support is not None and not support.available:
        return
    for driver in context.drivers:
        yield f"DRA registry of {driver}", _registry(context, driver)
        yield f"DRA directory of {driver}", _directory(context, driver)
        yield f"DRA slices of {driver}", _slices(context, driver)
        yield f"DRA features for {driver}", _features(context, driver)
        if context.config.dra.partitions:
            yield f"DRA counters for {driver}", _counters(context, driver)
        yield f"DeviceClass {driver}", _device_class(context, driver)
        yield f"resource names of {driver}", _resource_names(context, driver)
        yield f"policy {_POLICY}", _policy(context, driver)


async def _support(context: Context) -> Check:
    support = await context.probe(offer.dra_support)
    if support.available:
        return ok(support.reason)
    if asks_for(context.config, "dra", context.node_name):
        return wrong(
            f"impossible: {support.reason}",
            "update Kubernetes, or set allocation.api to auto: the node then offers its cards by "
            "the device plugin",
            context.command("config show", *context.options),
        )
    return ok(f"allocation.api is auto, and that is the device plugin: {support.reason}")


async def _registry(context: Context, driver: str) -> Check:
    path = context.directory.parent / REGISTRY
    remedy = f"start the kubelet, which makes it; in a Pod, mount the host's there: {_COMPONENT}"
    found = writable(context, await context.in_thread(lambda: directory(path)), remedy)
    if found.remedy:
        return found
    names = await context.in_thread(lambda: sorted(each.name for each in path.iterdir()))
    theirs = [
        name
        for name in names
        if re.match(rf"{re.escape(driver)}(?![a-z0-9.])", name) and not made_by_us(name, driver)
    ]
    if theirs:
        return wrong(
            f"{', '.join(theirs)} in {path}: a second driver registers as {driver}",
            "delete the vendor's DRA driver (kubectl get daemonsets -A | grep -i -e dra -e npu), "
            "or remove the socket if no "
            "process serves it",
            "kubectl get daemonsets -A | grep -i -e dra -e npu",
        )
    ours = sum(made_by_us(name, driver) for name in names)
    return ok(f"{found.detail}; {ours} of our sockets")


async def _directory(context: Context, driver: str) -> Check:
    path = context.directory.parent / PLUGINS / driver
    remedy = f"let the agent write the host's {path}, by the same path: {_COMPONENT}"
    place = await context.in_thread(lambda: directory(existing(path)))
    return writable(context, place, remedy)


async def _slices(context: Context, driver: str) -> Check:
    node = node_name(context)
    async with context.api_server() as api:
        found = (await resourceslices.read(api, node, driver)).slices
    ours = {slices.name(at, driver, node) for at in range(_MOST_SLICES)}
    if theirs := sorted(found.keys() - ours):
        return wrong(
            f"{theirs[0]} is not npu-agent's: a second driver publishes as {driver} on this node",
            f"delete that driver, and then: kubectl delete resourceslice {' '.join(theirs)}",
            "kubectl get daemonsets -A | grep -i -e dra -e npu",
        )
    if not found:
        if await context.probe_or(owner, Owner()) is None:
            return note("none, and no npu-agent serves this node")
        return wrong(
            "none, though an agent serves this node",
            "check that the agent has this configuration; else read its log, and the line "
            "readiness",
            context.agent_log,
        )
    devices = sum(len(each.get("spec", {}).get("devices") or ()) for each in found.values())
    return ok(f"{len(found)}, with {devices} device(s)")


async def _features(context: Context, driver: str) -> Check:
    tainted = {
        "name": "npu-doctor",
        "taints": [{"key": f"{driver}/unhealthy", "effect": Effect.NO_SCHEDULE.value}],
    }
    wanted = _slice(driver, node_name(context), {"devices": [tainted]})
    async with context.api_server() as api:
        reply = await resourceslices.dry_run(api, wanted)
    if fields := slices.dropped(wanted, reply):
        return note(
            f"the API server drops {', '.join(fields)}: a feature gate is off there",
            "turn on the feature gate DRADeviceTaints (on by default from Kubernetes 1.36); "
            "until then an unhealthy card is left out of the slices instead of tainted",
        )
    return ok("the API server keeps taints of devices")


async def _counters(context: Context, driver: str) -> Check:
    found = (await context.probe(report)).dra
    if found is None:
        raise Unknown("no npu-agent answers that knows: ask in its Pod")
    dropped = {field for one in found if one.driver == driver for field in one.slices.dropped}
    if fields := sorted(COUNTERS & dropped):
        return note(
            f"the API server drops {', '.join(fields)}: dra.partitions has no effect",
            "turn on the feature gate DRAPartitionableDevices (on by default from Kubernetes "
            "1.36); until then cards are offered whole",
        )
    return ok("the API server keeps counters: cards are cut on demand")


async def _device_class(context: Context, driver: str) -> Check:
    try:
        async with context.api_server() as api:
            await resourceclaims.device_class(api, driver)
    except ApiError as error:
        match error.kind:
            case Kind.NOT_FOUND:
                return wrong(
                    "missing: a claim that names it stays Pending",
                    "apply again what the agent was installed from, with the component "
                    "k8s/components/dra: kubectl apply -k OVERLAY; if that was Helm: helm upgrade "
                    f"npu-agent k8s/chart --namespace {context.namespace} "
                    "--reset-then-reuse-values --set dra.enabled=true",
                    "kubectl get daemonsets -A -l app.kubernetes.io/part-of=npu-agent "
                    "-L app.kubernetes.io/managed-by",
                )
            case Kind.FORBIDDEN:
                return _for_administrators(f"kubectl get deviceclass {driver}")
        raise
    return ok("there")


async def _resource_names(context: Context, driver: str) -> Check:
    try:
        async with context.api_server() as api:
            classes = await resourceclaims.device_classes(api)
    except ApiError as error:
        if error.kind is Kind.FORBIDDEN:
            return _for_administrators("npu-agent doctor on the host, with a kubeconfig")
        raise
    allocatable = (await context.probe(own_node)).status.allocatable
    return resource_names(driver, classes, allocatable)


def resource_names(
    driver: str, classes: Collection[DeviceClass], allocatable: Mapping[str, str]
) -> Check:
    by_resource: dict[str, list[DeviceClass]] = {}
    for one in classes:
        if resource := one.spec.extended_resource_name:
            by_resource.setdefault(resource, []).append(one)
    ours = {
        resource: same
        for resource, same in sorted(by_resource.items())
        if any(_concerns(one, driver) for one in same)
    }
    if not ours:
        return unused("no class has a resource name: Pods ask for cards by claims")
    if several := [_rivals(name, same) for name, same in ours.items() if len(same) > 1]:
        return wrong(
            "; ".join(several),
            "keep one, and delete the others (kubectl delete deviceclass NAME) or their "
            "extendedResourceName: the scheduler uses the newest only",
            _CLASSES,
        )
    if plugged := [f"{allocatable[one]} {one}" for one in ours if allocatable.get(one, "0") != "0"]:
        return note(
            f"a device plugin still offers {', '.join(plugged)} here: Pods that ask for it are "
            "given those, and nothing of the slices of this node",
            "delete the other device plugin that registers that name",
            _CLASSES,
        )
    return ok(f"{len(ours)} resource name(s), each of one class")


def _concerns(one: DeviceClass, driver: str) -> bool:
    vendor = driver.partition(".")[2]
    domain = (one.spec.extended_resource_name or "").partition("/")[0]
    return f".{domain}".endswith(f".{vendor}") or f'"{driver}"' in str(one.spec.selectors)


def _rivals(resource: str, classes: Collection[DeviceClass]) -> str:
    created = {one.name: one.metadata.creation_timestamp or "" for one in classes}
    *others, last = names = sorted(created)
    newest = max(names, key=created.__getitem__)  # the first of several
    listed = f"{', '.join(others)} and {last}"
    return f"{resource} is the resource name of {listed}: the scheduler takes {newest}"


def _for_administrators(how: str) -> Check:
    return unused(f"ask an administrator, the agent does not read it: {how}")


async def _policy(context: Context, driver: str) -> Check:
    """Whether a slice of another node is refused: a dry run, which writes nothing."""
    if not context.in_pod:
        return unused("it is about the agent's own account: ask in its Pod")
    wanted = _slice(driver, "npu-doctor.invalid", {"devices": []})
    try:
        async with context.api_server() as api:
            await resourceslices.dry_run(api, wanted)
    except ApiError as error:
        if error.kind is not Kind.FORBIDDEN:
            raise
        if _POLICY in error.what:
            return ok("this account may not write slices of other nodes")
        return unknown(f"refused, and not by that policy: {error.what}")
    return note(
        "this account may write slices of other nodes",
        f"{_COMPONENT}, which has the policy, and apply it: {context.apply_again()}; the policy's "
        "condition has to match this ServiceAccount",
    )


def _slice(driver: str, node: str, content: dict[str, Any]) -> dict[str, Any]:
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
