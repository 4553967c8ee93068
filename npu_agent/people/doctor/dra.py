"""Checks of Dynamic Resource Allocation: support by this node, and needs of its drivers."""

from __future__ import annotations

import re
from pathlib import Path

from npu_agent.config.resources import asks_for
from npu_agent.kube import dra
from npu_agent.kubelet.lock import Owner
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.service import PLUGINS, REGISTRY, made_by_us
from npu_agent.outputs.dra.support import Support, support
from npu_agent.people.doctor.agent import owner
from npu_agent.people.doctor.check import (
    Check,
    Context,
    Lines,
    Unknown,
    note,
    ok,
    unused,
    wrong,
)
from npu_agent.people.doctor.host import usable
from npu_agent.text import NAMED

_MOST_SLICES = 64
_FIND = "kubectl get daemonsets -A | grep -i -e dra -e npu"
_COMPONENT = "add the component k8s/components/dra (Helm: dra.enabled)"


def node_name(context: Context) -> str:
    """This host's Node; raises Unknown if it is not set."""
    if context.node_name is None:
        raise Unknown("NODE_NAME is not set")
    return context.node_name


async def dra_support(context: Context) -> Support:
    name = node_name(context)
    async with context.api_server() as api:
        return await support(api, name)


def may_use_dra(context: Context) -> bool:
    config = context.config
    node = context.node_name
    return asks_for(config, "dra", node) or asks_for(config, "auto", node)


async def lines(context: Context) -> Lines:
    if not may_use_dra(context):
        yield "DRA", unused("allocation.api is device-plugin")
        return
    yield "DRA", _support(context)
    support = await context.probe_or(dra_support, None)
    if support is not None and not support.available:
        return
    driver = context.vendor.dra.driver
    yield f"DRA registry of {driver}", _registry(context, driver)
    yield f"DRA directory of {driver}", _directory(context, driver)
    if support is not None:
        yield f"DRA slices of {driver}", _slices(context, driver)


async def _support(context: Context) -> Check:
    support = await context.probe(dra_support)
    if support.available:
        return ok(support.reason)
    if asks_for(context.config, "dra", context.node_name):
        return wrong(
            f"impossible: {support.reason}",
            "update Kubernetes, or set allocation.api to auto: the node then offers its cards by "
            "the device plugin",
            "kubectl get node -o wide && npu-agent config show",
        )
    return ok(f"allocation.api is auto, and that is the device plugin: {support.reason}")


async def _registry(context: Context, driver: str) -> Check:
    path = context.directory.parent / REGISTRY
    remedy = f"start the kubelet, which makes it; in a Pod, mount the host's there: {_COMPONENT}"
    check = await usable(context, path, remedy, write=True)
    if check.remedy:
        return check
    names = await context.in_thread(lambda: sorted(entry.name for entry in path.iterdir()))
    theirs = [
        name
        for name in names
        if re.match(rf"{re.escape(driver)}(?![a-z0-9.])", name) and not made_by_us(name, driver)
    ]
    if theirs:
        return wrong(
            f"{', '.join(theirs)} in {path}: a second driver registers as {driver}",
            f"delete the vendor's DRA driver ({_FIND}), or the socket if no process serves it",
            _FIND,
        )
    ours = sum(made_by_us(name, driver) for name in names)
    return ok(f"{check.detail}; {ours} of our sockets")


async def _directory(context: Context, driver: str) -> Check:
    path = context.directory.parent / PLUGINS / driver
    remedy = f"let the agent write the host's {path}, by the same path: {_COMPONENT}"
    place = await context.in_thread(lambda: existing(path))
    return await usable(context, place, remedy, write=True)


def existing(path: Path) -> Path:
    """The directory itself, or the one above it that exists; may block."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


async def _slices(context: Context, driver: str) -> Check:
    node = node_name(context)
    async with context.api_server() as api:
        listing = await dra.list_slices(api, node, driver)
    published = listing.slices
    ours = {slices.name(at, driver, node) for at in range(_MOST_SLICES)}
    if theirs := sorted({*published, *listing.foreign} - ours):
        named = " ".join(theirs[:NAMED])
        return wrong(
            f"{theirs[0]} is not npu-agent's: a second driver publishes as {driver} on this node",
            f"delete that driver, and then: kubectl delete resourceslice {named}",
            _FIND,
        )
    if not published:
        if await context.probe_or(owner, Owner()) is None:
            return note("none, and no npu-agent serves this node")
        return wrong(
            "none, though an agent serves this node",
            "check that the agent has this configuration; else read its log",
            context.agent_log,
        )
    devices = sum(len(slice_.get("spec", {}).get("devices") or ()) for slice_ in published.values())
    return ok(f"{len(published)}, with {devices} device(s)")
