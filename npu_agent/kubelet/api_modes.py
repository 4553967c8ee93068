"""Where each card of this node is offered: the one answer for the device plugin and for DRA.

Start reading at `ApiModes.now`; the decision itself is `npu_agent.core.api_mode`. Both outputs ask
it immediately before they publish, and note what they publish in the same moment, so that no card
can be taken by both. What it needs to know of acknowledgements it asks the kubelet and the API
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.core.api_mode import (
    ApiMode,
    CardUse,
    WantedApi,
    WantedApis,
    api_mode,
    moves_to,
    sends_elsewhere,
)
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Card, CardState, Snapshot
from npu_agent.core.ledger import DeviceName, keys_of
from npu_agent.core.offer import Device, cut, names
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.allocation_store import AllocationStore
from npu_agent.logs import logger

log = logger(__name__)

Offered = Callable[[], Awaitable[Mapping[str, frozenset[str]] | None]]
"""Asks the kubelet for the IDs that it can hand out of each resource; None if it does not say."""
Allocatable = Callable[[], Awaitable[Mapping[str, int] | None]]
"""Asks for the counts that the scheduler has for this node; None if they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of `ApiModes`, in seconds."""

    ask_first: float = 0.2
    """Between the first two questions whether a card has left the kubelet's list."""
    ask_longest: float = 2.0
    """Between later ones."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A card as the device plugin has listed it."""

    keys: frozenset[str]
    """Of the card: see `keys_of`."""
    names: frozenset[DeviceName]
    """Of its devices."""


async def _unknown() -> None:
    return None


class ApiModes:
    """Decides where cards are offered, and notes where they are."""

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        wanted: Feed[WantedApis],
        store: AllocationStore,
        offered: Offered = _unknown,
        allocatable: Allocatable = _unknown,
        timing: Timing = Timing(),
    ) -> None:
        """Nothing is asked before `run`.

        Args:
            snapshots: the cards.
            wanted: what the config says.
            store: the ledger.
            offered: see `Offered`.
            allocatable: see `Allocatable`.
            timing: all times.
        """
        self.wishes = wanted
        self.listed: Feed[Mapping[str, Listing]] = Feed({})
        """By ID, the cards that the kubelet may be able to hand out. Those that an agent before
        this one has listed are not among them: its stream has ended."""
        self._snapshots = snapshots
        self._store = store
        self._offered = offered
        self._allocatable = allocatable
        self._timing = timing
        self._lists: Feed[Mapping[str, Collection[Device]]] = Feed({})
        """What the device plugin lists now."""

    @property
    def feeds(self) -> tuple[Feed[Any], ...]:
        """What changes the answers of `now`, in addition to hardware and ledger."""
        return self.wishes, self.listed, self._store.published

    def now(self) -> Mapping[str, ApiMode]:
        """Where each card is to be offered, by its ID; holds until the next await."""
        return {id_: api_mode(situation) for id_, situation in self._situations().items()}

    def moving(self) -> Mapping[str, WantedApi]:
        """The cards that are on their way, by ID, and to which API."""
        found = {
            id_: moves_to(situation.wanted, api_mode(situation))
            for id_, situation in self._situations().items()
        }
        return {id_: to for id_, to in found.items() if to}

    def listing(self, lists: Mapping[str, Collection[Device]]) -> None:
        """Notes what the device plugin is about to list, by resource: what `now` allows."""
        self._lists.publish(lists)
        found: dict[str, tuple[frozenset[str], set[DeviceName]]] = {}
        for resource, devices in lists.items():
            for device in devices:
                _, ids = found.setdefault(device.card_id, (keys_of(device.card), set()))
                ids.add(DeviceName(resource, device.id))
        known = dict(self.listed.value)
        for id_, (keys, ids) in found.items():
            before = known.get(id_)
            if before is None or not (keys <= before.keys and ids <= before.names):
                known[id_] = Listing(
                    keys | (before.keys if before else frozenset()),
                    frozenset(ids) | (before.names if before else frozenset()),
                )
        self.listed.publish(known)

    def refusal(self, device: Device) -> RefusalError | None:
        """Why a claim is not given this device, although no holder has it; None: it may be."""
        place = self.now().get(device.card_id)
        if (
            not self._is_listed(device.card_id, device.card)
            or place is ApiMode.DRAINING_FROM_PLUGIN
        ):
            return None  # the ledger names who holds it
        if self.moving().get(device.card_id) is WantedApi.DRA:
            return RefusalError(
                Refusal.HELD,
                "its card is still listed by the device plugin, and is on its way to DRA: this "
                "takes some seconds, and the kubelet tries again",
            )
        return RefusalError(
            Refusal.UNFIT,
            "its card has moved to the device plugin (allocation.api), and the scheduler did not "
            "know that yet: delete the Pod, so that another card is allocated",
        )

    async def run(self) -> None:
        """Follows the config, and asks for what is missing, until cancelled."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._log_moves())
            parts.create_task(self._acknowledge())

    async def _log_moves(self) -> None:
        before = self.wishes.value
        async for wanted in self.wishes.watch():
            if sends_elsewhere(before, wanted):
                log.info("cards move to the other API", to=_ends(wanted))
            before = wanted

    async def _acknowledge(self) -> None:
        """Finds out which cards the kubelet no longer offers, while any are to be in slices."""
        async for _ in changes_of(self._lists, self.listed, self.wishes):
            pause = Backoff(first=self._timing.ask_first, longest=self._timing.ask_longest)
            while leaving := self._leaving():
                if not self._forget(leaving, await self._gone(leaving)):
                    await asyncio.sleep(pause.next())

    def _leaving(self) -> dict[str, Listing]:
        """The cards that were listed and are no longer, if that keeps any from its slice."""
        if WantedApi.DRA not in self.wishes.value.families.values():
            return {}
        listed_now = {device.card_id for each in self._lists.value.values() for device in each}
        return {id_: one for id_, one in self.listed.value.items() if id_ not in listed_now}

    async def _gone(self, leaving: Mapping[str, Listing]) -> set[str]:
        """Those of them that neither the kubelet nor the scheduler counts any more."""
        offered = await self._offered()
        if offered is None:
            return set()
        gone = {
            id_: one
            for id_, one in leaving.items()
            if not any(device in offered.get(resource, ()) for resource, device in one.names)
        }
        if not gone or (counts := await self._allocatable()) is None:
            return set()
        over = {
            resource
            for resource, devices in self._lists.value.items()
            if counts.get(resource, 0) > sum(device.healthy for device in devices)
        }
        return {id_ for id_, one in gone.items() if not any(name[0] in over for name in one.names)}

    def _forget(self, asked: Mapping[str, Listing], gone: Collection[str]) -> bool:
        """Takes note that cards have left the list; not of those that were listed meanwhile."""
        still, known = self._leaving(), dict(self.listed.value)
        left = [id_ for id_ in gone if still.get(id_) is asked[id_]]
        for id_ in left:
            del known[id_]
        self.listed.publish(known)
        return bool(left)

    def _is_listed(self, id_: str, card: Card) -> bool:
        listed = self.listed.value
        if not listed:
            return False
        keys = keys_of(card)
        return id_ in listed or any(keys & one.keys for one in listed.values())

    def _situations(self) -> Mapping[str, CardUse]:
        """By ID, each card's."""
        wishes, ledger = self.wishes.value, self._store.states.value
        cards = self._snapshots.value.cards
        if not (ledger.published or ledger.prepared) and set(wishes.families.values()) <= {
            WantedApi.PLUGIN
        }:  # a node without DRA: what the device plugin asks before each list costs nothing
            return {state.id: CardUse(wanted=_wish(wishes, state)) for state in cards}
        present = [state.card for state in cards]
        containers = ledger.conflicts(present, by_claim=False)
        claims = ledger.conflicts(present, by_plugin=False)
        found = {}
        for state in cards:
            (whole,) = cut(state, state.card.core_count)
            found[state.id] = CardUse(
                wanted=_wish(wishes, state),
                listed=self._is_listed(state.id, state.card),
                published=ledger.is_published(state.id, state.card),
                by_container=containers.against(None, whole) is not None,
                by_claim=claims.against(None, whole) is not None,
            )
        return found


def _wish(wishes: WantedApis, state: CardState) -> WantedApi:
    if wishes.disabled and not wishes.disabled.isdisjoint(names(state)):
        return WantedApi.NEITHER
    return wishes.families.get(state.card.family, WantedApi.PLUGIN)


def _ends(wishes: WantedApis) -> str:
    return ",".join(f"{family}:{wish.value}" for family, wish in sorted(wishes.families.items()))
