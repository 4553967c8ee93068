"""Counters of what each holder has used of each card: ``npu_holder_*``.

They count while this process owns the node's devices, and begin at 0 with it: two agents of one
node, as during a rollout, count nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from npu_agent.core.accounting import UNHELD, Account, Accounts, Subject
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import AgentState
from npu_agent.feed import Feed, changes_of
from npu_agent.outputs.prometheus.text import Samples, Since, by_name, label_text


class Accountant:
    """Keeps the accounts of a node true to its cards and to who holds them."""

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        holdings: Feed[tuple[Usage, ...]],
        longest: Feed[float],
        owned: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Counts nothing before `run`.

        Args:
            snapshots: the cards with their readings.
            holdings: who holds which cores.
            longest: as in `Accounts.follow`.
            owned: whether this agent owns the node's devices.
            clock: the one of `Reading.at`.
        """
        self._accounts = Accounts()
        self._snapshots = snapshots
        self._holdings = holdings
        self._longest = longest
        self._owned = owned
        self._clock = clock

    async def run(self) -> None:
        async for _ in changes_of(self._snapshots, self._holdings):
            self.count()

    def count(self) -> Mapping[Subject, Account]:
        """The accounts as they are now. When the node is owned no more, they end with this call."""
        snapshot = self._snapshots.value if self._owned() else Snapshot()
        self._accounts.follow(snapshot, self._holdings.value, self._clock(), self._longest.value)
        return self._accounts.accounts


_HELP = {
    "core_seconds_total": "Seconds for which cores were reserved, times their number, by holder; "
    "without a holder: for which they were free.",
    "busy_core_seconds_total": "Of these core-seconds, those spent on tasks.",
    "idle_core_seconds_total": "Of these core-seconds, those in which the core did nothing from "
    "one reading to the next.",
    "energy_joules_total": "Energy of the card, shared evenly by its cores, by holder.",
}
_CREATED = "npu_holder_created_timestamp_seconds"

DEFINITIONS = (
    *(by_name(f"npu_holder_{name}", text, kind="counter") for name, text in _HELP.items()),
    by_name(_CREATED, "When the counters of this holder began at 0, in seconds since 1970."),
)


def read(accounts: Mapping[Subject, Account], state: AgentState) -> Mapping[str, Samples]:
    """The samples of each family, by its name; `state` has the Node's name and the time."""
    found: dict[str, list[tuple[str, float | Since]]] = {each.name: [] for each in DEFINITIONS}
    for subject, account in accounts.items():
        labels, created = _labels(subject, state.hostname), round(state.wall(account.since), 3)
        counts = (account.reserved, account.busy, account.idle, account.joules)
        for name, count in zip(_HELP, counts, strict=True):
            value = None if count is None else round(count, 3)
            found[f"npu_holder_{name}"].append((labels, Since(value, created)))
        found[_CREATED].append((labels, created))
    return found


def _labels(subject: Subject, hostname: str) -> str:
    card = label_text(arch=subject.family, device=subject.card, hostname=hostname)
    if subject.holder == UNHELD:
        return card
    namespace, pod, uid, claim = subject.holder
    return label_text(card, namespace=namespace, pod=pod, uid=uid or None, claim=claim or None)
