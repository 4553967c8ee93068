"""How Pods of failed cards are evicted: as the Node, one at a time, and never in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from msgspec import convert

from npu_agent.core.hardware import CardState, Cause
from npu_agent.core.plan import Facts
from npu_agent.core.state import AgentState, EvictionState
from npu_agent.feed import Feed
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.outputs.condition import Observed
from npu_agent.outputs.evictions import (
    RESULTS,
    EvictionInputs,
    EvictionSettings,
    EvictionTiming,
    Evictor,
)
from npu_agent.supervise import background
from tests.core.test_evictions import facts_of, scene
from tests.outputs.deviceplugin.helpers import state as card
from tests.outputs.helpers import claim
from tests.outputs.web.helpers import Scene, driver, fenced
from tests.until import first, until

T = TypeVar("T")

AGENT = "kube-system/npu-agent-x7k2p"
QUICK = EvictionTiming(every=0.0, longest_pause=0.02, look_again=0.02)
HEALTHY = card(index=0), card(index=2), card(index=3)
REFUSED = ApiError("no", "", kind=ErrorKind.FORBIDDEN)


def dead(index: int, ago: float = 40.0) -> CardState:
    return fenced(card(index=index), "alive says 0", ago, Cause.DEAD)


class PodApi(Api):
    """An API server with Pods: each has the UID ``uid-namespace/name`` unless a test says else."""

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, dict[str, Any]] = {}
        self.evicted: Feed[tuple[str, ...]] = Feed(())
        self.refused: Callable[[Request[Any]], ApiError | None] = lambda _: None
        self.allowed = True

    async def ask(self, request: Request[T], **_: object) -> T:
        await asyncio.sleep(0)
        if refusal := self.refused(request):
            raise refusal
        if request.kind == "SelfSubjectAccessReview":
            return convert({"status": {"allowed": self.allowed}}, request.answer)
        assert request.as_node
        name = f"{request.namespace}/{request.name}"
        if request.subresource == "eviction":
            assert request.body
            uid = request.body["deleteOptions"]["preconditions"]["uid"]
            assert uid == f"uid-{name}"
            self.evicted.publish((*self.evicted.value, name))
            return convert({}, request.answer)
        meta = {"namespace": request.namespace, "name": request.name, "uid": f"uid-{name}"}
        more = self.pods.get(name, {})
        return convert({**more, "metadata": {**meta, **more.get("metadata", {})}}, request.answer)


@dataclass
class Place:
    """A node with an Evictor; a test changes the scene."""

    scene: Scene
    api: PodApi = field(default_factory=PodApi)
    settings: Feed[EvictionSettings] = field(
        default_factory=lambda: Feed(EvictionSettings(evict=True, after=30.0))
    )
    changed: Feed[int] = field(default_factory=lambda: Feed(0))
    owned: bool = True

    def state(self) -> AgentState:
        return self.scene.state()

    def facts(self) -> Facts | None:
        return facts_of(self.scene.state()) if self.owned else None

    @asynccontextmanager
    async def evictor(self, timing: EvictionTiming = QUICK) -> AsyncIterator[Evictor]:
        evictor = Evictor(
            api=self.api,
            own_pod=AGENT,
            inputs=EvictionInputs(
                observed=Observed(self.state, (self.changed,)),
                facts=self.facts,
                settings=self.settings,
            ),
            due=Feed(frozenset()),
            timing=timing,
        )
        async with background(evictor.run()):
            yield evictor

    def becomes(self, scene: Scene) -> None:
        self.scene = scene
        self.changed.publish(self.changed.value + 1)


def one_dead() -> Place:
    return Place(scene(*HEALTHY, dead(1)))


async def decided(evictor: Evictor, condition: Callable[[EvictionState], object]) -> EvictionState:
    return await first(evictor.state, condition)


async def test_the_pod_of_a_dead_card_is_evicted_once_by_its_uid() -> None:
    place = one_dead()
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.evicted)
        await until(lambda: evictor.state.value.results["evicted"] == 1)
        assert set(evictor.state.value.results) == {*RESULTS}
        (evicted,) = state.evicted
        assert (evicted.pod, evicted.uid) == ("default/pod-1", "uid-default/pod-1")
        assert (evicted.card.name, evicted.seconds) == ("npu1", 40)
        assert evictor.due.value == {dead(1).id}
        # It takes its time to end, and is not asked again.
        place.becomes(place.scene)
        await asyncio.sleep(0.05)
        assert place.api.evicted.value == ("default/pod-1",)


async def test_nothing_is_evicted_unless_the_config_says_so_and_the_node_is_ours() -> None:
    place = one_dead()
    place.settings.publish(EvictionSettings(evict=False, after=30.0))
    async with place.evictor() as evictor:
        await asyncio.sleep(0.02)
        assert evictor.state.value == EvictionState()
        place.owned = False
        place.settings.publish(EvictionSettings(evict=True, after=30.0))
        await asyncio.sleep(0.02)
        assert (place.api.evicted.value, evictor.due.value) == ((), frozenset())
        place.owned = True
        place.becomes(place.scene)
        await first(place.api.evicted, len)
        place.settings.publish(EvictionSettings(evict=False, after=30.0))
        await first(evictor.due, lambda cards: not cards)


async def test_a_card_that_becomes_due_is_not_waited_for_by_polling() -> None:
    place = Place(scene(*HEALTHY, dead(1, ago=29.9)))
    async with place.evictor():
        await first(place.api.evicted, len)


async def test_a_card_that_recovers_while_the_pod_is_read_keeps_its_pod() -> None:
    place = one_dead()

    def recovers(request: Request[Any]) -> None:
        if request.name == "pod-1":
            place.scene = scene(*HEALTHY, card(index=1))

    place.api.refused = recovers
    async with place.evictor() as evictor:
        await until(lambda: evictor._progress == {} and place.scene.cards[3].health.cause is None)
        await asyncio.sleep(0.02)
        assert place.api.evicted.value == ()


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": {"uid": "another"}},
        {"metadata": {"deletionTimestamp": "2026-11-29T00:00:00Z"}},
        {"status": {"phase": "Succeeded"}},
    ],
)
async def test_another_pod_of_this_name_and_one_that_ends_are_left(pod: dict[str, Any]) -> None:
    place = one_dead()
    place.api.pods["default/pod-1"] = pod
    reads = 0

    def count(request: Request[Any]) -> None:
        nonlocal reads
        reads += request.name == "pod-1"

    place.api.refused = count
    async with place.evictor() as evictor:
        await until(lambda: reads)
        await asyncio.sleep(0.02)
        assert place.api.evicted.value == ()
        assert not evictor.state.value.waiting


@pytest.mark.parametrize(
    ("meta", "daemon"),
    [
        ({"ownerReferences": [{"kind": "DaemonSet"}]}, True),
        ({"annotations": {"kubernetes.io/config.mirror": "x"}}, False),
    ],
)
async def test_a_pod_that_would_come_back_is_left_and_named_once(
    meta: dict[str, Any], daemon: bool
) -> None:
    place = one_dead()
    place.api.pods["default/pod-1"] = {"metadata": meta}
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.evicted)
        await asyncio.sleep(0.02)
        (left,) = evictor.state.value.evicted
        assert (left.left, left.of_daemon_set) == (True, daemon)
        assert evictor.state.value.results["left"] == 1
        assert state.waiting == ()


async def test_a_budget_is_waited_for_and_named() -> None:
    place = one_dead()
    budget = ApiError("no", "", kind=ErrorKind.TOO_MANY, causes={"DisruptionBudget": "needs 1"})
    place.api.refused = lambda asked: budget if asked.subresource else None
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.waiting)
        (waiting,) = state.waiting
        assert (waiting.pod, waiting.why.kind) == ("default/pod-1", "EvictionBudget")
        assert waiting.why.facts == {"budget": "needs 1"}
        place.api.refused = lambda _: None
        state = await decided(evictor, lambda state: state.results.get("evicted", 0))
        assert state.waiting == ()
        assert state.results["refused"] >= 1


async def test_an_api_server_that_is_away_is_asked_again() -> None:
    place = one_dead()
    away = ApiError("away", "", kind=ErrorKind.UNREACHABLE)
    place.api.refused = lambda _: away
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.waiting)
        assert state.waiting[0].why.kind == "EvictionFailed"
        place.api.refused = lambda _: None
        await first(place.api.evicted, len)


@pytest.mark.parametrize("missing", ["impersonation", "eviction"])
async def test_a_missing_right_is_named_before_a_card_fails(missing: str) -> None:
    place = Place(scene(*HEALTHY))
    place.api.allowed = missing != "eviction"
    if missing == "impersonation":
        place.api.refused = lambda asked: REFUSED if asked.as_node else None
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.refusal)
        assert not any(state.results.values())
        place.api.allowed = True
        place.api.refused = lambda _: None
        await decided(evictor, lambda state: not state.refusal)


async def test_without_the_right_a_taint_still_reaches_claims() -> None:
    place = one_dead()
    place.api.allowed = False
    async with place.evictor() as evictor:
        await first(evictor.due, lambda cards: cards == {dead(1).id})
        assert place.api.evicted.value == ()


@pytest.mark.parametrize("extended", [False, True])
async def test_a_pod_that_names_its_claim_is_left_to_its_taint(extended: bool) -> None:
    prepared = replace(claim("train", dead(1)), pod_uids=("uid-ml/train-pod",))
    place = Place(Scene(cards=(*HEALTHY, dead(1)), dra=(driver(prepared),)))
    named = {"spec": {"resourceClaims": [{"name": "npu", "resourceClaimName": "train"}]}}
    by_resource = {"status": {"extendedResourceClaimStatus": {"resourceClaimName": "train"}}}
    place.api.pods["ml/train-pod"] = by_resource if extended else named
    async with place.evictor() as evictor:
        if extended:
            await first(place.api.evicted, len)
        done = {"uid-ml/train-pod"}
        await until(lambda: [each.done for each in evictor._progress.values()] == [done])
        assert place.api.evicted.value == (("ml/train-pod",) if extended else ())


async def test_pods_are_evicted_one_after_the_other() -> None:
    cards = [card(index=index) for index in range(4)]
    place = Place(scene(*cards, dead(4, 200.0), dead(5, 100.0)))
    async with place.evictor(replace(QUICK, every=0.2)) as evictor:
        await first(place.api.evicted, len)
        assert place.api.evicted.value == ("default/pod-4",), "who waited longest is first"
        await asyncio.sleep(0.05)
        assert place.api.evicted.value == ("default/pod-4",)
        await decided(evictor, lambda state: state.results.get("evicted") == 2)


async def test_a_reason_that_holds_for_all_is_that_of_each_pod() -> None:
    place = Place(scene(dead(0), dead(1)))
    async with place.evictor() as evictor:
        state = await decided(evictor, lambda state: state.waiting)
        assert {waiting.why.kind for waiting in state.waiting} == {"EvictionOfHost"}
        assert [waiting.pod for waiting in state.waiting] == ["default/pod-0", "default/pod-1"]
        assert not evictor.due.value


async def test_a_card_that_comes_back_late_has_its_time_when_the_others_are_back() -> None:
    place = Place(scene(dead(0), dead(1), dead(2)))
    async with place.evictor() as evictor:
        await decided(evictor, lambda state: state.waiting)
        place.becomes(scene(*HEALTHY, dead(1)))
        await decided(evictor, lambda state: not state.waiting)
        await asyncio.sleep(0.05)
        assert not evictor.due.value
        assert place.api.evicted.value == ()
        place.settings.publish(EvictionSettings(evict=True, after=0.1))
        await first(place.api.evicted, len)
        assert evictor.due.value == {dead(1).id}


async def test_each_pod_of_a_shared_claim_is_read_once() -> None:
    """The kubelet has both UIDs for the claim, and both Pods tolerate its taint."""
    pods = ("one", "other")
    shared = claim("shared", dead(1), pods=pods)
    shared = replace(shared, pod_uids=("uid-ml/one", "uid-ml/other"))
    place = Place(Scene(cards=(*HEALTHY, dead(1)), dra=(driver(shared),)))
    named = {"spec": {"resourceClaims": [{"name": "npu", "resourceClaimName": "shared"}]}}
    place.api.pods = dict.fromkeys(("ml/one", "ml/other"), named)
    reads: list[str] = []
    place.api.refused = lambda asked: reads.append(asked.name) if asked.name in pods else None
    async with place.evictor():
        await until(lambda: {*reads} == {*pods})
        await asyncio.sleep(0.05)
        assert sorted(reads) == [*pods]
        assert place.api.evicted.value == ()


async def test_a_daemon_sets_pod_is_left_once_though_its_device_had_another_pod_before() -> None:
    place = one_dead()
    place.api.pods["default/pod-1"] = {"metadata": {"ownerReferences": [{"kind": "DaemonSet"}]}}
    facts = facts_of(place.scene.state())
    allocations = {
        name: replace(allocation, pod_uids=allocation.pod_uids | {"ended"})
        for name, allocation in facts.ledger.allocations.items()
    }
    ledger = replace(facts.ledger, allocations=allocations)
    place.facts = lambda: replace(facts, ledger=ledger)  # type: ignore[method-assign]
    async with place.evictor() as evictor:
        await decided(evictor, lambda state: state.evicted)
        await asyncio.sleep(0.05)
        assert evictor.state.value.results["left"] == 1


async def test_a_right_that_is_missing_is_looked_at_at_intervals_while_the_api_server_is_away() -> (
    None
):
    place = Place(scene(*HEALTHY))
    asked = 0

    def answer(_: Request[Any]) -> ApiError:
        nonlocal asked
        asked += 1
        return REFUSED if asked == 1 else ApiError("away", "", kind=ErrorKind.UNREACHABLE)

    place.api.refused = answer
    async with place.evictor(replace(QUICK, look_again=0.05)) as evictor:
        await decided(evictor, lambda state: state.refusal)
        await until(lambda: asked >= 2)
        await asyncio.sleep(0.1)
        assert asked <= 6


async def test_a_pod_whose_eviction_is_forbidden_holds_up_no_other_one() -> None:
    place = Place(scene(*HEALTHY, card(index=1), dead(4, 200.0), dead(5, 100.0)))
    place.api.refused = lambda asked: (
        REFUSED if asked.subresource and asked.name == "pod-4" else None
    )
    async with place.evictor():
        await first(place.api.evicted, lambda pods: "default/pod-5" in pods)
