"""Remedies by cause: one table for status page, doctor, verify, runbook and docs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from npu_agent.core.hardware import Cause
from npu_agent.core.trends import TrendKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npu_agent.core.hardware import Card, CardState, Health
    from npu_agent.core.state import Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The meaning of a cause and its remedy, in words for people."""

    means: str
    """A clause with the card as its subject, or about it: ``it is too hot``."""
    remedy: str
    command: str = "dmesg | tail -n 50"
    """What to type first, on the node; `npu-agent` is typed as `typed` has it."""
    shared: str = "the driver or the host, not the cards"
    """What it is most likely where every card of the node has this cause."""
    runbook: str = "npucardunhealthy"
    """The section of the runbook that has the steps."""


KUBELET = "systemctl status kubelet"
COOLING = "check its fan, slot and airflow"

ADVICE: Mapping[Cause, Advice] = {
    Cause.DEAD: Advice(
        means="the driver reports the card dead",
        remedy="check `dmesg` on the node for the driver's messages; then reset the card, "
        "reload the driver, or reboot the node",
    ),
    Cause.NODES: Advice(
        means="its device nodes are missing",
        remedy="reload the driver: it is partially unloaded, or udev was stopped",
    ),
    Cause.HANGS: Advice(
        means="it does not answer",
        remedy="check `dmesg` on the node for the read that hangs in the kernel; most likely a "
        "reboot is needed",
    ),
    Cause.NONSENSE: Advice(
        means="the driver returned an invalid value",
        remedy="reload the driver; if that does not help, reboot the node",
    ),
    Cause.HOT: Advice(
        means="it is too hot",
        remedy=f"{COOLING}; it recovers when it has cooled down",
        command="npu-agent info",
        shared="the cooling of the host, not the cards",
        runbook="nputemperaturehigh",
    ),
}
"""For each cause. The table of the runbook (docs/alerts.md) is made from it by `make docs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendAdvice:
    """The words for a trend on a card, and its remedy."""

    begins: str
    """With the card before it: ``is hot``."""
    many: str
    """The same of several cards: ``are hot``."""
    ends: str
    remedy: str
    runbook: str
    command: str = ADVICE[Cause.DEAD].command


TRENDS: Mapping[TrendKind, TrendAdvice] = {
    TrendKind.HOT: TrendAdvice(
        begins="is hot",
        many="are hot",
        ends="is no longer hot",
        remedy=COOLING,
        runbook="nputemperaturehigh",
        command=ADVICE[Cause.HOT].command,
    ),
    TrendKind.ERRORS: TrendAdvice(
        begins="counts new errors",
        many="count new errors",
        ends="has counted no new errors for 15 minutes",
        remedy="check the Pods that use it; a single occurrence needs no action",
        runbook="npuerrorsrising",
    ),
    TrendKind.FLAPPING: TrendAdvice(
        begins="is flapping",
        many="are flapping",
        ends="has stopped flapping: check its health",
        remedy="cordon it until it is repaired: each failure also fails the Pods that use it",
        runbook="npucardflapping",
        command="npu-agent cordon {card} --reason flapping",
    ),
    TrendKind.TWINS: TrendAdvice(
        begins="reports the UUID of another card",
        many="report one UUID",
        ends="has its own UUID",
        remedy="give one of them its own UUID (firmware), or remove it: they are served under "
        "other IDs, and records by UUID mix them up",
        runbook="log-lines",
        command="npu-agent info -o wide",
    ),
    TrendKind.LINK: TrendAdvice(
        begins="has a slow PCIe link",
        many="have a slow PCIe link",
        ends="has the full speed of its PCIe link",
        remedy="reseat it when its Pods have ended; until then it works with less bandwidth",
        runbook="npulinkslow",
        command="lspci -vv",
    ),
    TrendKind.SLOW: TrendAdvice(
        begins="is slow",
        many="are slow",
        ends="is no longer slow",
        remedy="check its power cable and sense pins and the kernel log; raise a limit that was "
        "set by mistake, or ask the vendor with the text of this line",
        runbook="npucardslow",
        command=ADVICE[Cause.HOT].command,
    ),
}
"""For each thing that lasts."""

GONE = (
    "if it was not removed on purpose, check on the node with `lspci` whether the bus still has "
    "it, and with `dmesg` why it left"
)
"""What to do about a card that left."""
UNREADABLE = "check `dmesg` on the node and reload the driver: it may be a card"
"""What to do about an entry that cannot be read: `SkippedDevice.unread`."""


def advice(cause: Cause | None) -> Advice:
    """Returns the advice for an unhealthy card; an unknown cause counts as a dead card."""
    return ADVICE[cause or Cause.DEAD]


def by_cause(cards: Iterable[CardState]) -> list[list[CardState]]:
    """Groups unhealthy cards by cause, in the order of the first card of each."""
    by_cause: dict[Cause | str, list[CardState]] = {}
    for card in cards:
        by_cause.setdefault(card.health.cause or card.health.reason, []).append(card)
    return [*by_cause.values()]


def plain_reason(health: Health) -> str:
    """Returns the reason of a health state: plain words, then those of driver or probe."""
    if health.cause is None:
        return health.reason
    return f"{ADVICE[health.cause].means} ({health.reason})"


def typed(command: str, invocation: Invocation, node: str | None) -> str:
    """A command of these tables as a person types it, at a desk or on the node.

    Empty if there is none: cordons need a Node's name.
    """
    program, *words = shlex.split(command) or ("",)
    if program != "npu-agent":
        return command
    if words[0] in ("cordon", "uncordon"):
        return shlex.join(("kubectl", "npu", words[0], node, *words[1:])) if node else ""
    return invocation.command(*words)


def device_paths(cards: Iterable[Card]) -> str:
    """Shell words that stand for the device nodes of these cards, and of no others.

    Also those that are missing: ``/dev/npu2 /dev/npu2[_a-z]*``.
    """
    return " ".join(path for card in cards for path in _paths(card.access.nodes()))


def _paths(nodes: Sequence[str]) -> list[str]:
    # What comes first and last has in common what all have.
    pairs = zip(min(nodes), max(nodes), strict=False)
    stem = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not stem[-1:].isdigit():
        return [shlex.quote(f"/dev/{node}") for node in nodes]
    # A letter ends the number: npu2 must not stand for npu20.
    return [f"/dev/{stem}"] * (stem in nodes) + [f"/dev/{stem}[_a-z]*"]
