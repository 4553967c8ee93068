"""Stand-ins for what an output asks: who holds what, and the API server."""

import asyncio
import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.ledger import (
    Assignment,
    DeviceName,
    Footprint,
    Ledger,
    PreparedClaim,
    PreparedDevice,
    Usage,
    keys_of,
)
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.core.pool import PoolDevice
from npu_agent.feed import Feed
from npu_agent.kube import Api, ApiError
from npu_agent.kube.errors import answered
from npu_agent.kube.request import Request
from npu_agent.kubelet.allocator import Allocator, ClaimPool, PlanInputs
from npu_agent.kubelet.cdi import PluginSpecs
from npu_agent.kubelet.cordons import CordonStore
from npu_agent.kubelet.podresources import PodResources
from npu_agent.kubelet.pods import Pods
from npu_agent.typedjson import convert
from npu_agent.vendors.furiosa.attributes import DRA
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.kube.apiserver import FaultyApiServer

T = TypeVar("T")

RESOURCE = "beta.furiosa.ai/npu"
DRIVER = "npu.furiosa.ai"
NODE = "node-1"


class DirectApi(Api):
    """Asks the stand-in for the API server without a connection, so that it takes no time."""

    def __init__(self, server: FaultyApiServer) -> None:
        super().__init__()
        self.server = server
        self.calls: Feed[int] = Feed(0)
        self.answers = asyncio.Event()
        """Set, except while it takes its time."""
        self.answers.set()
        self.refused: Callable[[Request[Any]], ApiError | None] = lambda _: None
        """What it has against a request."""
        self.after: Callable[[dict[str, Any]], object] = lambda _: None
        """Sees each answer, which it may change; what it raises is raised instead."""

    async def ask(self, request: Request[T], **_: object) -> T:
        self.calls.publish(self.calls.value + 1)
        await self.answers.wait()
        if refusal := self.refused(request):
            raise refusal
        self.server.calls.append(request.verb)
        status, found = self.server.act(request.verb, request.path, {**(request.body or {})})
        if status >= 400:
            raise answered(request, status, {}, json.dumps(found).encode(), None)
        found = copy.deepcopy(found)
        self.after(found)
        return convert(found, request.answer)


class LivingPods(Pods):
    """The Pods of a node, as a test has them."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), Path("/nowhere"))
        self.notes: dict[DeviceName, frozenset[str]] = {}
        """The UIDs of the Pods that have each device, as the kubelet noted them last."""
        self.alive: set[str] = set()
        """Those with a process, by UID."""
        self.waiting: set[str] = set()
        """Those with a cgroup, and no process yet."""

    async def device_holders(self) -> Mapping[DeviceName, frozenset[str]]:
        await asyncio.sleep(0)
        return dict(self.notes)

    async def cgroups(self, uids: Collection[str]) -> Mapping[str, bool]:
        await asyncio.sleep(0)
        return self.cgroups_of(uids)

    def cgroups_of(self, uids: Collection[str]) -> dict[str, bool]:
        return {uid: uid in self.alive for uid in (self.alive | self.waiting).intersection(uids)}


class Kubelet(PodResources):
    """Its pod-resources API: answers when a test publishes `holdings`."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.node = LivingPods()
        self.ledger = Feed(ledger or Ledger())
        super().__init__(Path("/nowhere"), Feed(1e9), self.node, self.ledger)
        self.asked = 0
        self.asked_soon = 0

    def ask(self) -> None:
        self.asked += 1

    def ask_soon(self) -> None:
        self.asked_soon += 1


def allocator_of(
    kubelet: PodResources,
    snapshots: Feed[Snapshot],
    directory: Path,
    wishes: Feed[PluginWishes],
    claims: Feed[DraWishes] | None = None,
    **options: Any,
) -> Allocator:
    """An Allocator without cordons, with the vendor's DRA driver; by default it offers nothing.

    `options` are `pool`, `cordons`, and those of the Allocator.
    """
    nothing = DraWishes(families=frozenset())
    pool = options.pop("pool", None) or ClaimPool(
        DRA, frozenset(FAMILIES), claims or Feed(nothing), snapshots
    )
    cordons = options.pop("cordons", None) or CordonStore(
        Feed(""), snapshots, Feed(frozenset()), directory, start=0.0
    )
    return Allocator(
        PlanInputs(snapshots=snapshots, wishes=wishes, pool=pool, cordons=cordons),
        pod_resources=kubelet,
        directory=directory,
        **{"specs": PluginSpecs(directory / "cdi", "furiosa.ai/npu"), **options},
    )


def bare_pool(devices: tuple[PoolDevice, ...] | None = None) -> ClaimPool:
    """A pool that offers what a test publishes in `offered`."""
    wishes = Feed(DraWishes(families=frozenset(FAMILIES)))
    pool = ClaimPool(DRA, frozenset(FAMILIES), wishes, Feed(Snapshot()))
    pool.offered.publish(devices)
    return pool


def holdings(
    snapshot: Snapshot,
    *assignments: Assignment,
    claims: Iterable[PreparedClaim] = (),
    uses: Iterable[Assignment] = (),
) -> tuple[Usage, ...]:
    """What the cards' holders hold once the kubelet has reported these, and prepared claims."""
    cards = [state.card for state in snapshot.cards]
    ledger = Ledger().with_answer(assignments, 1.0, cards=cards, resources={RESOURCE})
    for claim in claims:
        ledger = ledger.with_claim(claim)
    return ledger.usages(snapshot.cards, uses)


def claim(
    name: str, *cards: CardState, pods: tuple[str, ...] = (), request: str = "npu"
) -> PreparedClaim:
    """A prepared claim in the namespace ml, for whole cards; by default of the Pod of its name."""
    return PreparedClaim(
        driver=DRIVER,
        uid=f"uid-{name}",
        namespace="ml",
        name=name,
        pods=pods or (f"{name}-pod",),
        devices=tuple(
            PreparedDevice(
                request=request,
                pool=NODE,
                device=f"npu-{state.id.lower()}",
                footprint=Footprint(keys_of(state.card), state.card.all_cores, frozenset()),
            )
            for state in cards
        ),
    )


def used(claim: PreparedClaim, *containers: str) -> list[Assignment]:
    """Pod-resources' lines of the claim in these containers of its first Pod."""
    return [
        Assignment("ml", claim.pods[0], container, DRIVER, device.device, claim.name)
        for container in containers
        for device in claim.devices
    ]
