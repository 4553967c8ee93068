"""The commands for a problem, as its reader can type them. The same in each language. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, takewhile

from npu_agent.core.hardware import Cause
from npu_agent.core.kinds import TRAITS, Kind, Problem
from npu_agent.core.state import Invocation
from npu_agent.text import NAMED

Command = str | tuple[str, ...]
"""A line for a shell, or the words that follow `npu-agent`. Fields are as in `_values`.

A line that does not begin with ``kubectl`` is for a shell on the node.
"""

DMESG = "dmesg | tail -n 50"
KUBELET = "systemctl status kubelet"
_INFO = ("info",)
_DOCTOR = ("doctor",)

CAUSES: Mapping[Cause, Command] = {
    Cause.NODES: "ls -l {nodes}",
    Cause.HOT: _INFO,
}
"""For unhealthy cards; of another cause `DMESG`."""

KINDS: Mapping[Kind, Command] = {
    "AllCardsUnhealthy": "kubectl cordon {node}",
    "CardFlapping": ("cordon", "{card}", "--reason=flapping"),
    "CardHot": _INFO,
    "CardVeryHot": "fuser -v {nodes}",
    "ReadingsStale": DMESG,
    "ErrorsRising": DMESG,
    "LinkSlow": "lspci -vv",
    "CardSlow": _INFO,
    "SameUUID": ("info", "-o", "wide"),
    "CardMissing": "lspci{slot}",
    "AllCardsMissing": "kubectl cordon {node}",
    "DeviceMissing": "lspci",
    "CardReplaced": ("info", "-o", "wide"),
    "EarlierCardMissing": "lspci",
    "FewerCardsThanExpected": "lspci",
    "EntryUnreadable": DMESG,
    "ResourceNotRegistered": KUBELET,
    "DRANotRegistered": KUBELET,
    "ConfigRefused": ("config", "check", "{file}"),
    "CardCordoned": ("uncordon", "{card}"),
    "CordonedCardUnhealthy": ("uncordon", "{card}"),
    "LoadWithoutPod": "fuser -v {nodes}",
}
HELD: Mapping[Kind, Command] = {"CardVeryHot": "{cordon}"}
"""The first command where Pods hold the cards."""
LAST = ("CardUnhealthy", "CardVeryHot", "CardMissing", "DeviceMissing", "CardReplaced")
"""Kinds that may end with deleted Pods."""


def first(problem: Problem, invocation: Invocation, node: str | None) -> str:
    """Returns what to type first: at a desk, or on the host of an agent that runs in no Pod.

    Empty where there is nothing, or where the Node or file that it needs is not known.
    """
    # An API server that is away: what helps with the first thing that waits for it.
    kind = problem.parts[0].kind if problem.kind == "APIServerAway" else problem.kind
    command = _DOCTOR if TRAITS[kind].doctor else KINDS.get(kind, "")
    if kind == "CardUnhealthy":
        command = CAUSES.get(problem.cause or Cause.DEAD, DMESG)
    if problem.pods:
        command = HELD.get(kind, command)
    values = _values(problem, invocation, node)
    try:
        if isinstance(command, tuple):
            verb, *words = (word.format_map(values) for word in command)
            if verb in ("cordon", "uncordon"):
                return invocation.service(verb, *words, node=values["node"])
            return invocation.command(verb, *words)
        line = command.format_map(values)
    except KeyError:
        return ""
    if not line or not node or line.startswith("kubectl"):
        return line
    return invocation.on_node(line, node)


def last(problem: Problem) -> str:
    """Returns the command that deletes its Pods; empty where there are none, or that is no help."""
    return _delete(problem.pods) if problem.kind in LAST and not problem.of_host else ""


def _values(problem: Problem, invocation: Invocation, node: str | None) -> dict[str, str]:
    """The words that the fields stand for; without those that are not known."""
    pci = problem.facts.get("pci")
    nodes = problem.facts.get("nodes", ())
    assert isinstance(nodes, tuple)  # noqa: S101 (as the rules have it)
    known = {
        # `Invocation.command` quotes these two.
        "card": problem.cards[0].name if problem.cards else None,
        "file": invocation.config_file or None,
        "node": node and shlex.quote(node),
        "nodes": device_paths(nodes[:NAMED]),
        # First of all, or the Pod that comes in place of a deleted one gets the hot card again.
        "cordon": node
        and " && ".join(
            invocation.service("cordon", card.name, "--reason=hot", node=node)
            for card in problem.cards
        ),
        "slot": f" -s {shlex.quote(str(pci))}" if pci else "",
    }
    # No command is better than one with a gap.
    return {name: words for name, words in known.items() if words is not None}


def _delete(pods: Sequence[str]) -> str:
    """The command that deletes Pods, ``namespace/pod``."""
    names = sorted(tuple(pod.split("/", 1)) for pod in pods)
    return " && ".join(
        shlex.join(["kubectl", "delete", "pod", "-n", namespace, *(name for _, name in own)])
        for namespace, own in groupby(names, lambda pod: pod[0])
    )


def device_paths(cards: Iterable[Sequence[str]]) -> str:
    """Shell words that stand for the device nodes of these cards, and of no others.

    Also those that are missing: ``/dev/npu2 /dev/npu2[_a-z]*``.
    """
    return " ".join(path for nodes in cards for path in _paths(nodes))


def _paths(nodes: Sequence[str]) -> list[str]:
    # What comes first and last has in common what all have.
    pairs = zip(min(nodes), max(nodes), strict=False)
    stem = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not stem[-1:].isdigit():
        return [shlex.quote(f"/dev/{node}") for node in nodes]
    # A letter ends the number: npu2 must not stand for npu20.
    others = f"/dev/{stem}[_a-z]*"
    return [f"/dev/{stem}", others] if stem in nodes else [others]
