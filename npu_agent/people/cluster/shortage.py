"""Why the devices of a Node do not suffice for claims, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

from npu_agent.kube.objects import Node, ResourceClaim
from npu_agent.people.cluster.allocation import Asked, Devices, GivesUpError, Offered
from npu_agent.people.cluster.cel import CannotJudgeError, CelError, matches, terms
from npu_agent.people.cluster.scheduling import Kind, Reason, most
from npu_agent.text import one_line

_TAINTS = {"unhealthy": Kind.UNHEALTHY}
"""By the last part of a taint's key."""


def shortages(devices: Devices, node: Node, claims: Sequence[ResourceClaim]) -> list[Reason]:
    """Returns what each request lacks on a Node; if none does, what all of them lack together."""
    found = []
    for claim in claims:
        for request in claim.spec.devices.requests:
            lacking = [_lacking(devices, node, one) for one in devices.asked(request)]
            if all(lacking):
                found += [reason for reason in lacking[:1] if reason]
    if found:
        return found
    constraints = [
        str(one.get("matchAttribute") or one.get("distinctAttribute"))
        for claim in claims
        for one in claim.spec.devices.constraints
    ]
    if constraints:
        what = f"no devices that are free meet the constraint on {', '.join(constraints)}"
        return [Reason(Kind.CONSTRAINT, what)]
    return [Reason(Kind.IN_USE, "its requests together want more devices than are free")]


def holder(claim: ResourceClaim) -> str:
    """Names the holder of a claim's devices."""
    pods = [one.name for one in claim.status.reserved_for if one.resource == "pods"]
    if not pods:
        return f"claim {claim.key}, which no Pod uses"
    return f"{claim.namespace}/{pods[0]}" + (f" and {len(pods) - 1} more" if pods[1:] else "")


def _lacking(devices: Devices, node: Node, asked: Asked) -> Reason | None:
    offered = devices.of(node)
    wanted = Fraction(asked.count)
    if not offered:
        return Reason(Kind.NOT_OFFERED, _nothing(devices, node, asked), wanted)
    chosen = [one for one in offered if _selected(asked, one, node)]
    if not chosen:
        return Reason(Kind.SELECTOR, _no_match(asked, offered), wanted)
    in_use = [] if asked.admin else [one for one in chosen if one.id in devices.holders]
    rest = [one for one in chosen if one not in in_use]
    tainted = [(one, taint) for one in rest if (taint := asked.barred(one))]
    bad = {one.id for one, _ in tainted}
    rest = [one for one in rest if one.id not in bad]
    short = [one for one in rest if not one.pool.has(one, {})]
    free = [one for one in rest if one not in short]
    needed = len(chosen) if asked.all else asked.count
    if len(free) >= needed:
        return None
    parts = [
        f"request {asked.name} wants {'all' if asked.all else needed} of {len(chosen)} devices"
    ]
    parts[0] += f", {len(free)} are free"
    if in_use:
        parts.append(f"{len(in_use)} in use by {_names(devices, in_use)}")
    if short:
        pools = [each for one in short for each in one.pool.devices if each.id in devices.holders]
        parts.append(f"{len(short)} share cores with devices in use by {_names(devices, pools)}")
        parts.append(_widest(devices, offered))
    taints = Counter(f"{taint.key}:{taint.effect}" for _, taint in tainted)
    parts += [f"{count} have the taint {key}" for key, count in taints.items()]
    kind = Kind.IN_USE
    if len(chosen) < needed:
        kind = Kind.TOO_BIG
    elif len(chosen) - len(tainted) < needed:
        kind = min(_TAINTS.get(one.key.rpartition("/")[2], Kind.DEVICE_TAINT) for _, one in tainted)
    return Reason(kind, "; ".join(parts), Fraction(needed), Fraction(len(free)))


def _selected(asked: Asked, device: Offered, node: Node) -> bool:
    try:
        return asked.selects(device, node)
    except (GivesUpError, CannotJudgeError):
        return False


def _nothing(devices: Devices, node: Node, asked: Asked) -> str:
    troubled = [(name, pool) for (_, name), pool in devices.pools(node).items() if pool.trouble]
    if troubled:
        return "; ".join(f"its pool {name} {pool.trouble}" for name, pool in troubled)
    return f"offers no devices by DRA, for request {asked.name}"


def _no_match(asked: Asked, offered: Sequence[Offered]) -> str:
    """The terms of selectors that no device meets; else that none meets all of them."""
    for whose, expression in asked.selectors:
        parts = terms(expression)
        none = [part for part in parts if not any(_meets(part, one) for one in offered)]
        if none:
            text = " and ".join(one_line(part, 120) for part in none)
            return f"none of its {len(offered)} devices meets {text} of {whose}"
    what = " and ".join(one_line(one, 120) for _, one in asked.selectors)
    return f"none of its {len(offered)} devices meets all of {what}"


def _meets(term: str, device: Offered) -> bool:
    try:
        return matches(term, device.device, device.id.driver)
    except (CelError, CannotJudgeError):
        return False


def _names(devices: Devices, held: Iterable[Offered]) -> str:
    return most(Counter(holder(devices.holders[one.id]) for one in held))


def _widest(devices: Devices, offered: Sequence[Offered]) -> str:
    """The free device that takes the most counters."""
    free = [
        one
        for one in offered
        if one.id not in devices.holders
        and one.pool.has(one, {})
        and not any(taint.bars for taint in one.taints)
    ]
    if not free:
        return "no part of a card is left"
    best = max(free, key=lambda one: sum(amount for _, amount in one.counters))
    cores = best.device.attribute("cores")
    return f"the widest that is left is {best.id.device}" + (f" ({cores} cores)" if cores else "")
