"""Claims on simulated values: cards, a kubelet's pod-resources, an API server and a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.ledger import Assignment, Ledger
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.core.pool import ClaimRef, PoolDevice, pool
from npu_agent.feed import Feed
from npu_agent.kube import Api
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.kubelet import allocator
from npu_agent.kubelet.allocator import ClaimPool
from npu_agent.kubelet.podresources import Holdings
from npu_agent.kubelet.record import RECORD, read_record, recover
from npu_agent.outputs.dra.claims import Claims, PrepareTiming
from npu_agent.vendors.furiosa.attributes import DRA
from tests.outputs.deviceplugin.helpers import resources, state
from tests.outputs.helpers import DRIVER, NODE, Kubelet, allocator_of

NPU = "beta.furiosa.ai/npu"


def ref(name: str = "c") -> ClaimRef:
    return ClaimRef(namespace="team", name=name, uid=f"uid-{name}")


def result(device: str, request: str = "npu", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": device, **more}


async def _nothing(_: str) -> None:
    pass


class _Api(Api):
    """Asks the room for a claim."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room

    async def ask(self, request: Request[Any], **_: object) -> Any:
        return await self._room.fetch(request.namespace, request.name)


class Room:
    """Claims on two Warboy cards; `restarted` is the next agent on the same disk."""

    listed: Collection[str] = ()
    """The families that the device plugin lists."""

    def __init__(self, directory: Path, *cards: CardState) -> None:
        self.directory = directory
        self.record = directory / RECORD
        self.cards = cards or (state(index=0), state(index=1))
        self.api: dict[tuple[str, str], Mapping[str, Any] | ApiError] = {}
        self.cdi_root = directory / "cdi"
        self.now = 1000.0
        self.timing = PrepareTiming(holder_ends=0.0, containers=0.01)
        self.allocator_timing = allocator.AllocatorTiming()
        self.fetched: Callable[[str], Awaitable[None]] = _nothing
        """What happens, before it is answered, when the API server was asked for a claim."""
        self.start()

    def start(self) -> None:
        self.snapshots: Feed[Snapshot] = Feed(Snapshot(self.cards, complete=True))
        self.kubelet = Kubelet(recover(Ledger(), read_record(self.directory), self.clock()))
        self.devices: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        families = frozenset(card.card.family for card in self.cards)
        wishes = Feed(DraWishes(families=frozenset()))
        pool = ClaimPool(DRA, families, wishes, self.snapshots)
        pool.known = self.devices
        self.wishes = Feed(PluginWishes(resources(NPU, None), frozenset(), self.listed))
        self.allocator = allocator_of(
            self.kubelet,
            self.snapshots,
            self.directory,
            self.wishes,
            pool=pool,
            timing=replace(self.allocator_timing, clock=self.clock),
        )
        self.claims = Claims(
            _Api(self), pool, self.allocator, NODE, self.cdi_root, timing=self.timing
        )
        self.claims.ready.publish(True)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    async def fetch(self, namespace: str, name: str) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        found = self.api.get((namespace, name))
        await self.fetched(name)
        if found is None:
            raise ApiError(f"{name} not found", kind=ErrorKind.NOT_FOUND, status=404)
        if isinstance(found, ApiError):
            raise found
        return found

    def claim(
        self, name: str = "c", *results: Mapping[str, Any], uid: str | None = None, **status: Any
    ) -> None:
        """The API server has this claim."""
        self.api["team", name] = {
            "metadata": {"namespace": "team", "name": name, "uid": uid or f"uid-{name}"},
            "status": {
                "allocation": {"devices": {"results": list(results)}},
                "reservedFor": [{"resource": "pods", "name": f"pod-{name}", "uid": f"pod-{name}"}],
                **status,
            },
        }

    def have(self, *cards: CardState) -> None:
        """From now on there are these cards."""
        self.cards = cards
        self.snapshots.publish(Snapshot(cards, complete=True))
        if self.devices.value is not None:
            self.known()

    def known(self) -> None:
        """It is known which devices there are."""
        families = {card.card.family for card in self.cards}
        self.devices.publish(
            pool(self.snapshots.value, dra=DRA, families=families, partitions=True)
        )

    def says(
        self,
        *held: str,
        uses: Sequence[tuple[str, str]] = (),
        driver: str = DRIVER,
        error: str | None = None,
    ) -> None:
        """The kubelet answers, two seconds later: these devices are held, these claims used."""
        self.now += 2.0
        answer = Holdings(
            assignments=tuple(Assignment("team", "train", "main", NPU, id_) for id_ in held),
            claim_uses=tuple(
                Assignment("team", f"pod-{claim}", "main", driver, device, claim)
                for claim, device in uses
            ),
            asked_at=self.now,
            pods=self.kubelet.node.notes,
            error=error,
        )
        cgroups = self.kubelet.node.cgroups_of(self.kubelet.orphan_candidates(answer))
        self.kubelet.holdings.publish(replace(answer, cgroups=cgroups))
        self.allocator.reconcile()

    async def renewed(self, *held: str, **answer: Any) -> None:
        """The node is this agent's; meanwhile the kubelet answers so, as for `says`."""
        renewing = asyncio.create_task(self.allocator.renew())
        while not renewing.done():
            self.says(*held, **answer)
            await asyncio.sleep(0.001)
        await renewing

    async def owned(self, *held: str, uses: Sequence[tuple[str, str]] = ()) -> None:
        """The node is this agent's, and the kubelet has said who holds what."""
        await self.renewed(*held, uses=uses)
        self.known()
        await self.claims.upkeep.recover()

    async def restarted(self, *held: str, uses: Sequence[tuple[str, str]] = ()) -> None:
        """The agent was killed and another one has started."""
        self.start()
        await self.owned(*held, uses=uses)

    async def prepared(self, name: str = "c") -> Any:
        """What the kubelet is answered when it has a claim prepared."""
        ((uid, answer),) = (await self.claims.prepare([ref(name)])).items()
        assert uid == ref(name).uid
        return answer

    async def unprepared(self, name: str = "c") -> None:
        assert await self.claims.unprepare([ref(name)]) == ""

    def specs(self) -> list[str]:
        return sorted(path.name for path in self.cdi_root.glob("*"))
