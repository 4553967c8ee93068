"""The devices that this node should offer, and by which API, as the agent computes it."""

from __future__ import annotations

from npu_agent.config import disabled_for
from npu_agent.config.resources import asks_for, offered_by, resources_of
from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.core.vendor_spec import merged
from npu_agent.outputs.dra.support import Support, support
from npu_agent.people.doctor.check import Unknown
from npu_agent.people.doctor.context import Context


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
    config, node = context.config, context.node_name
    return asks_for(config, "dra", node) or asks_for(config, "auto", node)


async def auto_is_dra(context: Context) -> bool | None:
    """Returns whether `auto` means DRA here; None: unknown; False without `auto`."""
    if not asks_for(context.config, "auto", context.node_name):
        return False
    found = await context.probe_or(dra_support, None)
    return found.available if found else None


async def by_claims(context: Context) -> bool:
    return asks_for(context.config, "dra", context.node_name) or bool(await auto_is_dra(context))


async def by_device_plugin(context: Context) -> tuple[Resource, ...]:
    available = await auto_is_dra(context)
    counts = merged([vendor.spec for vendor in context.vendors]).core_counts
    families = offered_by(
        context.config, counts, "device-plugin", context.node_name, auto=available
    )
    found = (one.of_families(families) for one in resources_of(context.config, counts))
    return tuple(resource for resource in found if resource.widths)


def devices(context: Context, resource: Resource, snapshot: Snapshot) -> tuple[Device, ...]:
    return advertise(snapshot, resource, disabled_for(context.config, context.node_name))
