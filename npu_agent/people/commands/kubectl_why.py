"""`kubectl npu why POD`: why it waits, or what it has and why, as lines or as JSON."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

from npu_agent.cli import CommandError
from npu_agent.kube import Api
from npu_agent.people.cluster.fetch import KINDS, Scope, fetch
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.why import NodeVerdict, Verdict, why
from npu_agent.text import listed, one_line

_LONGEST = 1000
"""Characters of a line."""
_NEEDED = ("Node", "Pod", "ResourceClaim", "ResourceSlice", "DeviceClass", "DeviceTaintRule")
"""Without these an answer may be wrong, which is then said."""
_NAMED = 3
"""Nodes of a line that several share."""
_MANY = 20
"""Lines for Nodes: beyond these, Nodes with reasons of the same kinds share one."""


async def verdict(api: Api, namespace: str, name: str) -> tuple[Verdict, Cluster]:
    """Returns the answer, and what it was made of.

    Raises:
        CommandError: there is no such Pod.
    """
    name = name.removeprefix("pod/")
    named = Scope(("pods",), namespace, pod=name)
    found, cluster = await asyncio.gather(fetch(api, named), fetch(api, Scope(tuple(KINDS))))
    for pod in found.pods:
        return why(pod, cluster), cluster
    missing = f"there is no Pod {name} in namespace {namespace}"
    owner = "if none was made, the Events of its Job or ReplicaSet say why (a quota, a policy)"
    raise CommandError(one_line(found.refused.get("Pod") or f"{missing}; {owner}"))


def lines(found: Verdict, *, each: bool = False) -> str:
    """A sentence, what is to be said of the Pod, and what Nodes say, `each` on its own line."""
    alone = (f"  {one.node}: {one}" for one in found.nodes)
    texts = (found.sentence, *found.details, *(alone if each else _shared(found.nodes)))
    return "\n".join(map(one_line_kept, texts))


def _shared(nodes: Sequence[NodeVerdict]) -> Iterator[str]:
    groups = _groups(nodes, str)
    if len(groups) > _MANY:
        groups = _groups(nodes, lambda one: frozenset(reason.kind for reason in one.reasons))
    for group in groups:
        first, *more = group
        who = f"{len(group)} Nodes ({listed((one.node for one in group), _NAMED)})"
        differ = any(str(one) != str(first) for one in more)
        yield f"  {who if more else first.node}{', the first' * differ}: {first}"


def _groups(
    nodes: Sequence[NodeVerdict], key: Callable[[NodeVerdict], Hashable]
) -> Collection[list[NodeVerdict]]:
    found: dict[Hashable, list[NodeVerdict]] = defaultdict(list)
    for one in nodes:
        found[key(one)].append(one)
    return found.values()


def one_line_kept(text: str) -> str:
    """Fit for a terminal, with the spaces that it begins with."""
    return " " * (len(text) - len(text.lstrip(" "))) + one_line(text, _LONGEST)


def data(found: Verdict) -> dict[str, Any]:
    """Returns the data for `-o json` and `-o yaml`; `fits` is null where unknown."""
    return {
        "sentence": found.sentence,
        "schedulable": found.schedulable,
        "details": [*found.details],
        "nodes": [
            {
                "node": each.node,
                "fits": each.fits,
                "reasons": [
                    {"kind": one.kind.name.lower(), "text": one.text} for one in each.reasons
                ],
                "notes": [*each.notes],
            }
            for each in found.nodes
        ],
    }


def notes(cluster: Cluster) -> Sequence[str]:
    """Returns remarks on what was not read, and so is not judged."""
    return [
        f"{said}: the answer may be wrong"
        for kind, said in cluster.refused.items()
        if kind in _NEEDED
    ]
