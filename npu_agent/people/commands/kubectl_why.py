"""`kubectl npu why POD`: the scheduler's words and facts, in lines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from msgspec.structs import replace

from npu_agent.cli import CommandError
from npu_agent.kube import Api
from npu_agent.people.cluster.fetch import fetch
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.view import Words
from npu_agent.people.cluster.why import Explanation, why
from npu_agent.text import listed, one_line

_KINDS = ("nodes", "pods", "claims", "slices", "classes", "taint_rules", "daemon_sets")
_LONGEST = 1000
"""Characters of a line."""
_NAMED = 3
"""Nodes of a line that several share."""
_MANY = 20
"""Lines: those of more Nodes are counted."""


async def answer(api: Api, namespace: str, name: str, words: Words) -> tuple[Explanation, Cluster]:
    """Returns the answer, and the cluster as far as the user may read it.

    Raises:
        ApiError: of any kind.
        CommandError: there is no such Pod, or it may not be read.
    """
    name = name.removeprefix("pod/")
    named, own, cluster = await asyncio.gather(
        fetch(api, "pods", namespace=namespace, pod=name),
        fetch(api, "claims", "templates", namespace=namespace),
        fetch(api, *_KINDS),
    )
    for pod in named.pods:
        refused = {**own.refused, **cluster.refused}
        answer = await asyncio.to_thread(why, pod, own, cluster, words)  # selectors take seconds
        return answer, replace(cluster, refused=refused)
    missing = f"there is no Pod {name} in namespace {namespace}"
    owner = "if none was made, the Events of its Job or ReplicaSet say why (a quota, a policy)"
    raise CommandError(one_line(named.refused.get("Pod") or f"{missing}; {owner}"))


def lines(answer: Explanation, *, each: bool = False) -> str:
    """The sentence, the scheduler's words, and the facts; `each`: of every Node alone."""
    said = [] if answer.scheduler is None else [f"The scheduler: {answer.scheduler}"]
    facts = [f"  {fact.subject}: {fact.text}" for fact in answer.facts] if each else _shared(answer)
    return "\n".join(map(_one_line_kept, (answer.sentence, *said, *facts)))


def _shared(answer: Explanation) -> Iterator[str]:
    """Yields the facts; subjects of which the same is true share a line."""
    subjects: dict[str, list[str]] = {}
    for fact in answer.facts:
        subjects.setdefault(fact.text, []).append(fact.subject)
    for at, (text, names) in enumerate(subjects.items()):
        if at == _MANY:
            yield f"  and {len(subjects) - _MANY} lines more: `-o wide` has them"
            return
        yield f"  {listed(names, _NAMED)}: {text}"


def _one_line_kept(text: str) -> str:
    """Fit for a terminal, with the spaces that it begins with."""
    return " " * (len(text) - len(text.lstrip(" "))) + one_line(text, _LONGEST)
