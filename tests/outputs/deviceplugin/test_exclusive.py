"""No core, and no device node, to two living holders: whatever happens, in whatever order.

A state machine plays hardware, kubelet, config, claims and the agent's own restarts against the
real Allocator. It knows which physical cores each container was given, and by which nodes. Slices
it plays as well, as `outputs/dra/driver.py` writes them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from npu_agent.core.grant import RefusalError, requested
from npu_agent.core.hardware import Card, CardState, Health, HealthState, Snapshot
from npu_agent.core.identity import identify
from npu_agent.core.ledger import (
    UNIDENTIFIED,
    Assignment,
    DeviceName,
    Ledger,
    PreparedClaim,
    PreparedDevice,
    footprint,
)
from npu_agent.core.offer import Device, cut
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.feed import Feed
from npu_agent.kubelet.allocator import Allocator, AllocatorTiming
from npu_agent.kubelet.podresources import Holdings, PodResources
from npu_agent.kubelet.record import RECORD, read_record, recover
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import resources
from tests.outputs.helpers import LivingPods, allocator_of

pytestmark = pytest.mark.timeout(300)

CLAIM, DRIVER = "claim", "npu.furiosa.ai"
PLUGIN, DRA, UNDECIDED = APIS = ("device-plugin", "dra", "auto, and the API server is away")
NAMES = ("beta.furiosa.ai/npu", "furiosa.ai/npu")
WIDTHS = (None, 1, 2, 4)
"""Of a resource's devices; what a family has no nodes for falls back to the whole card."""


@dataclass
class Physical:
    """A card as it is, whatever it says of itself."""

    slot: int
    family: str
    index: int
    uuid: str | None
    serial: str | None
    pci: str | None
    present: bool = True

    def state(self) -> CardState:
        card = FAMILIES[self.family].card(
            self.index,
            product=self.family,
            uuid=self.uuid,
            serial=self.serial,
            pci_bus_id=self.pci,
            nodes=frozenset(FAMILIES[self.family].nodes(self.index)),
        )
        return CardState(
            id="", card=card, health=Health(state=HealthState.HEALTHY, reason="works", since=0.0)
        )


@dataclass(frozen=True)
class Container:
    """What a running container really has."""

    assignment: Assignment
    cores: frozenset[tuple[int, int]]
    """Slot of the physical card, and core."""
    nodes: frozenset[tuple[str, int]]
    """Each node, and the slot of the card that it is shared within; -1: it is not to be shared."""
    slot: int
    """Where its card is."""
    card: Card
    """Its card when it was granted."""
    sharers: int
    """A number that all Pods of one claim have, which may share."""


class Kubelet(PodResources):
    """Answers when the machine has it answer; while it is down, only with errors."""

    def __init__(self, machine: Machine) -> None:
        ledger = Feed(recover(Ledger(), read_record(machine.directory), machine.now))
        super().__init__(Path("/nowhere"), Feed(1e9), machine.node, ledger)
        self.ledger = ledger
        self.machine = machine

    def ask(self) -> None:
        self.machine.answer(self)

    def ask_soon(self) -> None:
        pass


class Node(LivingPods):
    """What the kubelet has noted, and whose processes run."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def note(self) -> None:
        """The kubelet does when it hands out a device, and at no other time."""
        self.notes = {
            DeviceName(*name): frozenset({one.assignment.pod})
            for name, one in self.machine.containers.items()
            if name[0] != CLAIM
        }

    def cgroups_of(self, uids: Collection[str]) -> dict[str, bool]:
        present = {one.assignment.pod for one in self.machine.living()}
        return {uid: uid not in self.machine.waiting for uid in present.intersection(uids)}

    async def cgroups(self, uids: Collection[str]) -> dict[str, bool]:
        return self.cgroups_of(uids)


@dataclass
class Agent:
    allocator: Allocator
    snapshots: Feed[Snapshot]
    pod_resources: Kubelet
    wishes: Feed[PluginWishes]
    name: str
    api: str
    known: dict[str, frozenset[str]] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="npu-"))
        self.now = 1000.0
        self.containers: dict[tuple[str, str], Container] = {}
        self.forgotten: dict[str, Container] = {}
        """Of Pods that were deleted by force, by UID: they run, and the kubelet lists them not."""
        self.joined: dict[str, tuple[str, Container]] = {}
        """Of Pods that came to share a claim, by UID, with the claim's."""
        self.claimed_devices: dict[str, str] = {}
        """The device of each prepared claim, by the claim's UID."""
        self.lapses: dict[str, float] = {}
        """Until when an unidentified Pod that was deleted by force may run: its cores are kept no
        longer (docs/limitations.md)."""
        self.init: set[str] = set()
        """Pods whose init container has the device, which no list shows, by UID."""
        self.waiting: set[str] = set()
        """Those of them that have no process yet."""
        self.node = Node(self)
        self.count = 0
        self.up = True
        self.wrong = False
        """Whether the last answer of pod-resources left holders out."""
        self.young_until = 0.0
        """Until then the kubelet may leave out as many as it likes: it was just restarted."""
        self.snapshots: Feed[Snapshot] = Feed(Snapshot())
        self.agents: list[Agent] = []
        self.standby: Agent | None = None
        self.slices: set[str] = set()
        """The cards that the API server has in slices, by ID."""

    def living(self) -> list[Container]:
        """All containers that have, or are about to have, cores."""
        joined = [container for _, container in self.joined.values()]
        return [*self.containers.values(), *self.forgotten.values(), *joined]

    def teardown(self) -> None:
        self.runner.close()
        shutil.rmtree(self.directory)

    # Hardware

    @initialize(
        warboys=st.integers(2, 3),
        odd=st.sampled_from(("", "SER0_cores_0", "UUID-1_cores_0-1")),
        pci=st.booleans(),
        cores=st.sampled_from(WIDTHS),
        api=st.sampled_from((PLUGIN, DRA)),
    )
    def begin(self, warboys: int, odd: str, pci: bool, cores: int | None, api: str) -> None:
        self.cards = [
            Physical(
                slot=slot,
                family="warboy" if slot < warboys else "rngd",
                index=slot if slot < warboys else 0,
                uuid=f"UUID-{slot}",
                serial=f"SER{slot}",
                pci=f"0000:0{slot}:00.0" if pci else None,
            )
            for slot in range(warboys + 1)
        ]
        if odd:
            self.cards[0].serial = odd
            self.cards[0].uuid = None
        self.seen()
        self.agent = self.start(NAMES[0], cores, api)
        self.own(self.agent)

    def seen(self) -> None:
        """The inventories have seen all that has changed."""
        states = sorted(
            (c.state() for c in self.cards if c.present), key=lambda s: s.card.key[::-1]
        )
        ids = identify(tuple(state.card for state in states))
        self.snapshots.publish(
            Snapshot(
                tuple(replace(s, id=id_) for s, id_ in zip(states, ids, strict=True)), complete=True
            )
        )
        for agent in self.agents:
            agent.snapshots.publish(self.snapshots.value)
            agent.allocator.withhold()

    def settles(self, data: st.DataObject) -> None:
        """Mostly the publisher comes to know of a change before anything else happens."""
        self.seen()
        if data.draw(st.integers(0, 3), "published"):
            self.publishes()

    def card(self, data: st.DataObject) -> Physical:
        return data.draw(st.sampled_from(self.cards), "card")

    @rule(data=st.data())
    def renumbered(self, data: st.DataObject) -> None:
        first, second = data.draw(st.sampled_from(((0, 1), (0, 2), (1, 2))), "which two")
        cards = [card for card in self.cards if card.family == "warboy"]
        if second < len(cards):
            cards[first].index, cards[second].index = cards[second].index, cards[first].index
        self.settles(data)

    @rule(data=st.data(), what=st.sampled_from(("back", "unreadable", "doubled", "new")))
    def uuid_changes(self, data: st.DataObject, what: str) -> None:
        card = self.card(data)
        if not (card.serial or card.pci):
            what = "back"  # it always says something by which it can be known
        match what:
            case "back":
                card.uuid = f"UUID-{card.slot}"
            case "unreadable":
                card.uuid = None
            case "doubled":
                card.uuid = self.cards[card.slot - 1].uuid
            case "new":
                self.count += 1
                card.uuid = f"UUID-new-{self.count}"
        self.settles(data)

    @rule(data=st.data())
    def comes_or_goes(self, data: st.DataObject) -> None:
        card = self.card(data)
        card.present = not card.present
        self.settles(data)

    # Config

    @rule(data=st.data(), cores=st.sampled_from(WIDTHS), disabled=st.sampled_from(("", "npu0")))
    def configured(self, data: st.DataObject, cores: int | None, disabled: str) -> None:
        wishes = plugin_wishes(self.agent.name, cores, self.agent.api, disabled)
        self.agent.wishes.publish(wishes)
        self.settles(data)

    # The agent

    def start(self, name: str, cores: int | None, api: str) -> Agent:
        """Its config may say another API than that of the agent before it."""
        wishes = Feed(plugin_wishes(name, cores, api))
        families = frozenset(FAMILIES) if api == DRA else frozenset[str]()
        kubelet, snapshots = Kubelet(self), Feed(self.snapshots.value)
        allocator = allocator_of(
            kubelet,
            snapshots,
            self.directory,
            wishes,
            Feed(DraWishes(families=families, decided=api != UNDECIDED)),
            # They end when the machine has them end.
            timing=AllocatorTiming(holder_ends=0.0, clock=lambda: self.now),
        )
        self.agents.append(Agent(allocator, snapshots, kubelet, wishes, name, api))
        return self.agents[-1]

    def own(self, agent: Agent) -> None:
        self.agent, self.agents, self.standby = agent, [agent], None
        self.answer(agent.pod_resources)
        self.runner.run(agent.allocator.renew())

    @rule()
    def publishes(self) -> None:
        self.runner.run(self.agent.allocator.replan())

    @rule(name=st.sampled_from(NAMES), cores=st.sampled_from(WIDTHS), api=st.sampled_from(APIS))
    def killed_and_started(self, name: str, cores: int | None, api: str) -> None:
        """By SIGKILL, at whatever moment; its config may have changed meanwhile."""
        self.own(self.start(name, cores, api))

    @rule(name=st.sampled_from(NAMES), cores=st.sampled_from(WIDTHS), api=st.sampled_from(APIS))
    def stands_by(self, name: str, cores: int | None, api: str) -> None:
        self.standby = self.start(name, cores, api)
        self.answer(self.standby.pod_resources)
        self.runner.run(self.standby.allocator.replan())

    @precondition(lambda self: self.standby)
    @rule()
    def takes_over(self) -> None:
        assert self.standby
        self.own(self.standby)

    @rule(api=st.sampled_from(APIS))
    def ends_and_starts(self, api: str) -> None:
        """A rollout with another config moves the node to the other API."""
        self.runner.run(self.agent.allocator.end())
        self.own(self.start(self.agent.name, None, api))

    def notes_tell_all(self) -> bool:
        """Whether the kubelet's lists and notes say what each container has, without a record.

        They do not after a change of the resource's name: then nothing is left by which a card is
        known whose UUID has changed, too. Nor after a held card was renumbered: then nothing says
        which nodes its container was given.
        """
        return not self.slices and all(
            one.assignment.resource == self.agent.name
            and one.card == self.cards[one.slot].state().card
            and one.assignment.pod in self.node.notes.get(one.assignment.name, ())
            for one in self.living()
        )

    @precondition(lambda self: self.snapshots.value.cards and self.notes_tell_all())
    @rule(
        data=st.data(),
        what=st.sampled_from((None, None, "", "{", '{"version": 3}')),
        cores=st.sampled_from(WIDTHS),
    )
    def record_lost(self, data: st.DataObject, what: str | None, cores: int | None) -> None:
        """Only while no agent runs: it would write it again."""
        if data.draw(st.booleans(), "by force") and self.containers:
            self.pod_is_deleted_by_force(data)
        if what is None:
            (self.directory / RECORD).unlink(missing_ok=True)
        else:
            (self.directory / RECORD).write_text(what, encoding="utf-8")
        self.own(self.start(self.agent.name, cores, self.agent.api))
        self.prepare(data)
        self.allocate_more(data)

    # The two APIs

    @rule(lost=st.booleans(), killed=st.booleans())
    def slices_written(self, lost: bool, killed: bool) -> None:
        """As the driver does it; the answer may be lost, and the agent be killed meanwhile."""
        allocator, api = self.agent.allocator, self.agent.api
        offered = allocator.pool.offered.value
        if offered is None or api == UNDECIDED:
            return
        self.slices = {device.device.card_id for device in offered}
        if killed:
            self.own(self.start(self.agent.name, None, api))
        else:
            allocator.pool.confirmed.publish(None if lost else offered)

    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        """The scheduler may have allocated a card that has left the slices by now."""
        if claimed := self.claimed(data):
            self.count += 1
            self.prepared(f"uid-{self.count}", *claimed)

    def claimed(self, data: st.DataObject) -> tuple[str, Device] | None:
        """What the scheduler allocates, with its name in the pool; None: there is no card."""
        state = self.claimed_card(data)
        if state is None:
            return None
        (device,) = cut(state, state.card.core_count)
        return state.id, device

    def claimed_card(self, data: st.DataObject) -> CardState | None:
        """Drawn by its ID, and not as a value: Hypothesis prints what is drawn."""
        cards = {one.id: one for one in self.snapshots.value.cards}
        return cards[data.draw(st.sampled_from([*cards]), "claimed")] if cards else None

    @rule(data=st.data())
    def prepare_parts(self, data: st.DataObject) -> None:
        """Several of one card, of which some overlap: whoever has allocated them was wrong."""
        state = self.claimed_card(data)
        if state is None:
            return
        widths = FAMILIES[state.card.family].widths
        parts = {device.name: device for width in widths for device in cut(state, width)}
        for _ in range(4):
            device = parts[data.draw(st.sampled_from([*parts]), "part")]
            self.count += 1
            self.prepared(f"uid-{self.count}", f"{state.id}-{device.cores}", device)

    @precondition(lambda self: self.agent.allocator.prepared.value)
    @rule(data=st.data(), lives=st.booleans())
    def prepare_again(self, data: st.DataObject, lives: bool) -> None:
        """The kubelet was restarted, and the claim's Pod is gone: it is allocated for another one.

        The Pod before may have been deleted by force, so that its containers run.
        """
        uid = data.draw(st.sampled_from(sorted(self.agent.allocator.prepared.value)), "claim")
        for pod in [pod for pod, (of, _) in self.joined.items() if of == uid]:
            self.joined_ends(pod, forced=lives)
        before = self.containers.pop((CLAIM, uid), None)
        if before and lives:
            self.forgotten[before.assignment.pod] = before
        if claimed := self.claimed(data):
            self.prepared(uid, *claimed)

    def prepared(self, uid: str, name: str, device: Device) -> None:
        """A claim for a device is prepared for a Pod, if it may be."""
        self.count += 1
        pod = f"p-{self.count}"
        named = PreparedDevice(request="npu", pool="n1", device=name, footprint=footprint(device))
        claim = PreparedClaim(
            driver=DRIVER,
            uid=uid,
            namespace="team",
            name=uid,
            pods=(pod,),
            pod_uids=(pod,),
            devices=(named,),
        )
        allocator = self.agent.allocator
        try:
            self.runner.run(allocator.read_checkpoint())  # as `Claims` does
            self.runner.run(allocator.prepare(claim, [device]))
        except RefusalError:
            return
        self.runner.run(allocator.saved())
        self.claimed_devices[uid] = name
        self.given((CLAIM, uid), device, pod)

    @precondition(lambda self: self.unused())
    @rule(data=st.data())
    def unprepare(self, data: st.DataObject) -> None:
        """As a kubelet does it that has forgotten the claim's Pod, which may run."""
        uid = data.draw(st.sampled_from(self.unused()), "claim")
        self.unprepared(uid)

    def unprepared(self, uid: str) -> None:
        self.runner.run(self.agent.allocator.unprepare(uid))
        self.runner.run(self.agent.allocator.saved())

    def unused(self) -> list[str]:
        """The prepared claims, by UID, whose Pods are gone from all lists."""
        prepared = sorted(self.agent.allocator.prepared.value)
        joined = {uid for uid, _ in self.joined.values()}
        return [
            uid for uid in prepared if (CLAIM, uid) not in self.containers and uid not in joined
        ]

    def in_use(self) -> list[str]:
        """The prepared claims, by UID, whose first Pod is listed."""
        prepared = sorted(self.agent.allocator.prepared.value)
        return [uid for uid in prepared if (CLAIM, uid) in self.containers]

    @precondition(lambda self: self.up and self.in_use())
    @rule(data=st.data(), identified=st.booleans(), last=st.booleans())
    def joins(self, data: st.DataObject, identified: bool, last: bool) -> None:
        """A Pod comes to share a claim, and is listed; the API server may not say its UID.

        It may be the last one, and be deleted by force; then the kubelet unprepares the claim.
        """
        uid = data.draw(st.sampled_from(self.in_use()), "claim")
        first = self.containers[CLAIM, uid]
        self.count += 1
        pod = f"later-{self.count}"
        assignment = replace(first.assignment, pod=pod)
        self.joined[pod] = uid, replace(first, assignment=assignment)
        self.now += 0.1
        self.answer(self.agent.pod_resources)
        allocator = self.agent.allocator
        allocator.reconcile()
        claim = allocator.prepared.value[uid]
        assert pod in claim.unidentified
        if identified:
            known = replace(
                claim,
                pods=(*claim.pods, pod),
                pod_uids=(*claim.pod_uids, pod),
                unidentified=tuple(name for name in claim.unidentified if name != pod),
            )
            self.runner.run(allocator.prepare(known, ()))
        self.publishes()
        if last:
            del self.containers[CLAIM, uid]
            self.joined_ends(pod, forced=True)
            if uid in self.unused():
                self.unprepared(uid)
                self.prepare(data)

    def joined_ends(self, pod: str, *, forced: bool) -> None:
        uid, container = self.joined.pop(pod)
        if forced:
            self.forgotten[pod] = container
            if pod in self.agent.allocator.prepared.value[uid].unidentified:
                self.lapses[pod] = self.now + UNIDENTIFIED

    @precondition(lambda self: self.joined)
    @rule(data=st.data(), forced=st.booleans())
    def joined_pod_ends(self, data: st.DataObject, forced: bool) -> None:
        self.joined_ends(data.draw(st.sampled_from(sorted(self.joined)), "Pod"), forced=forced)

    def lapse(self) -> None:
        for pod in [pod for pod, until in self.lapses.items() if until <= self.now]:
            del self.lapses[pod]
            self.forgotten.pop(pod, None)

    # The kubelet

    def answer(self, kubelet: Kubelet, without: frozenset[tuple[str, str]] = frozenset()) -> None:
        if self.up:
            held, uses = self.listed(without)
            self.says(kubelet, Holdings(asked_at=self.now, assignments=held, claim_uses=uses))
            return
        before = kubelet.holdings.value
        self.says(kubelet, replace(before, asked_at=self.now, error="kubelet.sock is missing"))

    def listed(
        self, without: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
        """What pod-resources lists: devices, and uses of claims."""
        held = [
            one.assignment
            for name, one in self.containers.items()
            if name not in without and name[0] != CLAIM and one.assignment.pod not in self.init
        ]
        users = [(name[1], one) for name, one in self.containers.items() if name[0] == CLAIM]
        uses = [
            Assignment("team", one.assignment.pod, "main", DRIVER, self.claimed_devices[uid], uid)
            for uid, one in [*users, *self.joined.values()]
        ]
        return tuple(sorted(held)), tuple(sorted(uses))

    def says(self, kubelet: Kubelet, answer: Holdings) -> None:
        """It is followed by what its host knows of the Pods."""
        answer = replace(answer, pods=self.node.notes)
        cgroups = self.node.cgroups_of(kubelet.orphan_candidates(answer))
        kubelet.holdings.publish(replace(answer, cgroups=cgroups))
        for agent in self.agents:
            if agent.pod_resources is kubelet:
                agent.allocator.withhold()

    @rule(seconds=st.sampled_from((0.0, 0.1, 0.5, 1.5, 10.0, 100.0)))
    def answers(self, seconds: float) -> None:
        self.now += seconds
        self.lapse()
        self.wrong = False
        self.answer(self.agent.pod_resources)
        self.publishes()

    @rule(seconds=st.sampled_from((0.5, 3.0)), data=st.data())
    def answers_late(self, seconds: float, data: st.DataObject) -> None:
        """What it says is of the moment when it was asked."""
        pod_resources = self.agent.pod_resources
        held, uses = self.listed()
        asked_at = self.now
        self.now += seconds
        if data.draw(st.booleans(), "grant meanwhile"):
            self.allocate(data)
        if self.up:
            answer = Holdings(asked_at=asked_at, assignments=held, claim_uses=uses)
            self.says(pod_resources, answer)
            self.wrong = False
        self.publishes()

    @precondition(lambda self: not self.wrong or self.now < self.young_until)
    @rule(data=st.data())
    def answers_wrongly(self, data: st.DataObject) -> None:
        """It leaves out some of those that run, but not twice in a row unless just restarted."""
        without = data.draw(st.sets(st.sampled_from([*self.containers, ("", "")])), "left out")
        self.wrong = True
        self.answer(self.agent.pod_resources, frozenset(without))
        self.publishes()

    @rule()
    def kubelet_restarts(self) -> None:
        self.up, self.wrong = True, False
        self.young_until = self.now + 25.0
        self.agent.allocator.kubelet_lost()

    @rule()
    def kubelet_goes(self) -> None:
        self.up = False
        self.answer(self.agent.pod_resources)
        self.publishes()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """The kubelet knows devices by resource and ID, and gives none away twice."""
        resource = self.agent.name
        devices = self.agent.allocator.devices[resource].value
        free = [
            device.id
            for device in devices
            if device.healthy and (resource, device.id) not in self.containers
        ]
        if not free:
            return
        id_ = data.draw(st.sampled_from(free), "device")
        try:
            ((device,),) = requested([[id_]], {one.id: one for one in devices}, resource)
            self.runner.run(self.agent.allocator.grant(resource, [device]))
        except RefusalError:
            return
        self.given((resource, id_), device)
        self.node.note()

    @rule(data=st.data(), waits=st.booleans())
    def allocate_for_init(self, data: st.DataObject, waits: bool) -> None:
        """For an init container, which is not listed and may start much later."""
        before = set(self.containers)
        self.allocate(data)
        for name in self.containers.keys() - before:
            pod = self.containers[name].assignment.pod
            self.init.add(pod)
            if waits:
                self.waiting.add(pod)

    @precondition(lambda self: self.init)
    @rule(data=st.data(), cores=st.sampled_from(WIDTHS), restarts=st.booleans())
    def init_container_takes_long(
        self, data: st.DataObject, cores: int | None, restarts: bool
    ) -> None:
        """Its card is cut in another way meanwhile."""
        if restarts:
            self.own(self.start(self.agent.name, cores, self.agent.api))
        else:
            self.configured(data, cores, "")
        for seconds in (10.0, 100.0, 10.0):
            self.answers(seconds)
        self.allocate_more(data)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def init_container_starts(self, data: st.DataObject) -> None:
        self.waiting.remove(data.draw(st.sampled_from(sorted(self.waiting)), "Pod"))

    @precondition(lambda self: self.init - self.waiting)
    @rule(data=st.data())
    def sandbox_is_made_again(self, data: st.DataObject) -> None:
        """The init container will be started once more."""
        pods = sorted(one.assignment.pod for one in self.containers.values())
        if again := [pod for pod in pods if pod in self.init - self.waiting]:
            self.waiting.add(data.draw(st.sampled_from(again), "Pod"))

    def given(self, name: tuple[str, str], device: Device, pod: str = "") -> None:
        self.count += 1
        # The nodes are opened now: whose they are is decided by the number of now.
        (physical,) = [
            card
            for card in self.cards
            if card.present and (card.family, card.index) == device.card.key
        ]
        access = device.card.access
        shared = {*access.shared_nodes, *access.optional_nodes}
        self.containers[name] = Container(
            Assignment("team", pod or f"pod-{self.count}", "main", *name),
            frozenset((physical.slot, core) for core in device.cores),
            frozenset((node, physical.slot if node in shared else -1) for node in device.nodes),
            physical.slot,
            physical.state().card,
            self.count,
        )

    @rule(data=st.data())
    def allocate_more(self, data: st.DataObject) -> None:
        """What this is all about, so it happens more often than the rest."""
        self.allocate(data)
        self.allocate(data)

    @precondition(lambda self: self.containers)
    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.containers)), "Pod")
        self.waiting.discard(self.containers.pop(name).assignment.pod)
        if name[0] == CLAIM and name[1] in self.unused():
            self.unprepared(name[1])

    @precondition(lambda self: self.containers)
    @rule(data=st.data())
    def pod_is_deleted_by_force(self, data: st.DataObject) -> None:
        """What it had is free for the kubelet, and its containers run on.

        A claim is unprepared later, or is prepared again for another Pod.
        """
        name = data.draw(st.sampled_from(sorted(self.containers)), "Pod")
        container = self.containers.pop(name)
        if container.assignment.pod in self.waiting:
            self.waiting.remove(container.assignment.pod)  # the kubelet does not start it any more
        else:
            self.forgotten[container.assignment.pod] = container

    @precondition(lambda self: self.forgotten)
    @rule(data=st.data())
    def forgotten_pod_ends(self, data: st.DataObject) -> None:
        del self.forgotten[data.draw(st.sampled_from(sorted(self.forgotten)), "Pod")]

    @invariant()
    def no_card_is_offered_by_both(self) -> None:
        for each in self.agent.allocator.devices.values():
            for device in each.value:
                assert not (device.healthy and device.card_id in self.slices), device
        assert self.slices <= self.agent.allocator.published.value.keys()

    @invariant()
    def no_core_and_no_node_twice(self) -> None:
        cores: dict[tuple[int, int], Container] = {}
        nodes: dict[str, tuple[int, Container]] = {}
        for container in self.living():
            for core in container.cores:
                owner = cores.setdefault(core, container)
                assert owner.sharers == container.sharers, f"{container} and {owner}"
            for node, within in container.nodes:
                before = nodes.setdefault(node, (within, container))
                shared = before[1].sharers == container.sharers
                assert shared or before[0] == within >= 0, f"{node}: {container} and {before[1]}"


def plugin_wishes(name: str, cores: int | None, api: str, disabled: str = "") -> PluginWishes:
    overrides: tuple[tuple[str, str, int | None], ...] = ()
    if cores and cores > 2:
        overrides = ((name, "warboy", 2),)
    elif cores == 2:
        overrides = ((name, "warboy", 1),)
    offered = FAMILIES if api == PLUGIN else ()
    return PluginWishes(
        resources(name, cores, overrides), frozenset(filter(None, [disabled])), offered
    )


TestExclusive: Any = Machine.TestCase
TestExclusive.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
