"""Decides the API of each card of this node, for the device plugin and for DRA.

Start reading at `ApiModes.now`; the decision is `npu_agent.core.api_mode`. Both outputs ask and
note what they publish in the same moment, so that no card is in both.
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
)
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Card, CardState, Snapshot
from npu_agent.core.ledger import DeviceName, keys_of
from npu_agent.core.offer import Device, cut, names
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.allocation_store import AllocationStore

Offered = Callable[[], Awaitable[Mapping[str, frozenset[str]] | None]]
"""The IDs of each resource that the kubelet can hand out; None if it does not say."""
Allocatable = Callable[[], Awaitable[Mapping[str, int] | None]]
"""The counts that the scheduler has for this node; None if unknown."""


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

    keys: frozenset[str] = frozenset()
    names: frozenset[DeviceName] = frozenset()


async def _unknown() -> None:
    return None


class ApiModes:
    """Decides where cards are offered, and tracks where they are."""

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
        self.wishes = wanted
        self.listed: Feed[Mapping[str, Listing]] = Feed({})
        """By ID, the cards that the kubelet may be able to hand out, as this agent listed them."""
        self._snapshots = snapshots
        self._store = store
        self._offered = offered
        self._allocatable = allocatable
        self._timing = timing
        self._lists: Feed[Mapping[str, Collection[Device]]] = Feed({})

    @property
    def feeds(self) -> tuple[Feed[Any], ...]:
        return self.wishes, self.listed, self._store.published

    def now(self) -> Mapping[str, ApiMode]:
        """Returns the API of each card, by ID; true until the next await."""
        return {id_: api_mode(situation) for id_, situation in self._situations().items()}

    def moving(self) -> Mapping[str, WantedApi]:
        found = {
            id_: moves_to(situation.wanted, api_mode(situation))
            for id_, situation in self._situations().items()
        }
        return {id_: to for id_, to in found.items() if to}

    def listing(self, lists: Mapping[str, Collection[Device]]) -> None:
        """Records what the device plugin is about to list, by resource."""
        self._lists.publish(lists)
        found: dict[str, tuple[frozenset[str], set[DeviceName]]] = {}
        for resource, devices in lists.items():
            for device in devices:
                _, ids = found.setdefault(device.card_id, (keys_of(device.card), set()))
                ids.add(DeviceName(resource, device.id))
        known = dict(self.listed.value)
        for id_, (keys, ids) in found.items():
            before = known.setdefault(id_, Listing())
            if not (keys <= before.keys and ids <= before.names):
                known[id_] = Listing(before.keys | keys, before.names | ids)
        self.listed.publish(known)

    def refusal(self, device: Device) -> RefusalError | None:
        """Why a claim must not get a free device; None: it may."""
        place = self.now().get(device.card_id)
        if (
            not self._is_listed(device.card_id, device.card)
            or place is ApiMode.DRAINING_FROM_PLUGIN
        ):
            return None  # the ledger names who holds it
        if self.moving().get(device.card_id) is WantedApi.DRA:
            return RefusalError(
                Refusal.HELD,
                "its card is moving from the device plugin to DRA: the kubelet tries again "
                "within seconds",
            )
        return RefusalError(
            Refusal.UNFIT,
            "its card has moved to the device plugin (allocation.api) since the scheduler chose "
            "it: delete the Pod to get another card allocated",
        )

    async def run(self) -> None:
        """Finds out which listed cards the kubelet no longer offers, while any go to slices."""
        async for _ in changes_of(self._lists, self.listed, self.wishes):
            pause = Backoff(first=self._timing.ask_first, longest=self._timing.ask_longest)
            while leaving := self._leaving():
                if not self._forget(leaving, await self._gone(leaving)):
                    await asyncio.sleep(pause.next())

    def _leaving(self) -> dict[str, Listing]:
        """The cards that left our list and are still kept from their slice."""
        if WantedApi.DRA not in self.wishes.value.families.values():
            return {}
        listed_now = {device.card_id for each in self._lists.value.values() for device in each}
        return {id_: one for id_, one in self.listed.value.items() if id_ not in listed_now}

    async def _gone(self, leaving: Mapping[str, Listing]) -> set[str]:
        """Returns cards that neither the kubelet nor the scheduler counts any more."""
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
        """Forgets cards that have left the list, unless they were listed again meanwhile."""
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
