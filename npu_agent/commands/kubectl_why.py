"""`kubectl npu why POD`: why it waits, or what it has and why, as lines or as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from npu_agent.cluster.fetch import KINDS, Scope, fetch
from npu_agent.cluster.objects import Cluster
from npu_agent.cluster.why import Verdict, why
from npu_agent.commands import CommandError
from npu_agent.kube import Api
from npu_agent.text import one_line

_LONGEST = 1000
"""Characters of a line."""
_NEEDED = ("Node", "Pod", "ResourceClaim", "ResourceSlice", "DeviceClass", "DeviceTaintRule")
"""Without these an answer may be wrong, which is then said."""


async def verdict(api: Api, namespace: str, name: str) -> tuple[Verdict, Cluster]:
    """The answer, and what it was made of.

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


def lines(found: Verdict) -> str:
    """A sentence, what is to be said of the Pod, and a line for each Node."""
    nodes = [f"  {each.node}: {each}" for each in found.nodes]
    return "\n".join(one_line_kept(text) for text in (found.sentence, *found.details, *nodes))


def one_line_kept(text: str) -> str:
    """Fit for a terminal, with the spaces that it begins with."""
    return " " * (len(text) - len(text.lstrip(" "))) + one_line(text, _LONGEST)


def data(found: Verdict) -> dict[str, Any]:
    """For `-o json` and `-o yaml`; `fits` is null where it is not known."""
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
    """What was not read, and so is not judged."""
    return [
        f"{said}: the answer may be wrong"
        for kind, said in cluster.refused.items()
        if kind in _NEEDED
    ]
