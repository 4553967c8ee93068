"""The ledger: which container, claim or Pod has which cores. Values and decisions, no I/O.

No core, and no device node, may ever belong to two living holders. The kubelet knows devices by
resource and ID only: not that a device of another shape or resource has the same cores, that a card
was renumbered, or that two cards say the same UUID. So the ledger keeps what each device stood for
when it was handed out, a `Footprint`, and `Conflicts` compares that with the next one.

Start reading at `Ledger`. There are five sources:

- what was granted here (`Ledger.with_grant`), known at the moment of the grant;
- the kubelet's pod-resources API (`Ledger.with_answer`), which is late, absent after a restart of
  the kubelet, and silent about init containers;
- claims that were prepared here (`Ledger.with_claim`), held until they are unprepared;
- orphaned Pods (`Ledger.orphans`), which the kubelet no longer lists while their containers run;
- the record on disk (`Ledger.with_predecessor`), written before anything is offered, so that it
  covers every grant that an agent can have made before it was killed.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from npu_agent.core.hardware import Card, CardState, CoreRange, by_kind
from npu_agent.core.offer import Device, device_id

SETTLED = 1.0
"""Seconds after an Allocate from which on an answer of pod-resources includes it; also between the
two answers that end an allocation."""
UNSEEN = 60.0
"""Seconds for which a grant that pod-resources never showed counts as held: the kubelet does not
list init containers, nor Pods that are still being admitted."""
HOLDER_ENDS = 10.0
"""Seconds for the containers of a Pod that was deleted by force to end: the kubelet gives them two,
and has taken four. Then the Pod is an orphan and its device unhealthy. Earlier, a kubelet would
fail the next Pod, which can wait in its Allocate."""
UNIDENTIFIED = 600.0
"""Seconds for which an unprepared claim's cores stay held for a Pod whose UID is not known: nothing
shows when its containers end."""

_NONE: frozenset[str] = frozenset()


class DeviceName(NamedTuple):
    """A device of the device plugin, as the kubelet knows it; its holders are containers."""

    resource: str
    device: str


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """A prepared ResourceClaim, which holds cores for its Pods."""

    uid: str


@dataclass(frozen=True, slots=True)
class PodHolder:
    """An orphaned Pod, which the kubelet no longer lists."""

    uid: str


Holder = DeviceName | ClaimHolder | PodHolder


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """A device that a container holds, in the kubelet's words."""

    namespace: str
    pod: str
    container: str
    """"" where it is not known which of a Pod's."""
    resource: str
    """The resource's name; for a claim, the driver, and "" while it is not prepared."""
    device: str
    """The device's ID; for a claim, its name in the pool, and "" while it is not prepared."""
    claim: str = ""
    """The ResourceClaim in the Pod's namespace by which it is held; "": by the device plugin."""

    @property
    def name(self) -> DeviceName:
        return DeviceName(self.resource, self.device)

    @property
    def pod_name(self) -> str:
        """``namespace/pod``."""
        return f"{self.namespace}/{self.pod}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The cores and nodes that a device ID stood for when it was offered."""

    keys: frozenset[str]
    """Everything that identified the card: see `keys_of`."""
    cores: CoreRange
    nodes: frozenset[str]
    """Relative to /dev."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """A device of a prepared claim."""

    request: str
    pool: str
    device: str
    admin: bool = False
    """Whether it is an administrator's, who shares it with any holder."""
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClaim:
    """A ResourceClaim whose devices Pods may use, until it is unprepared."""

    driver: str
    uid: str
    namespace: str
    name: str
    pods: tuple[str, ...] = ()
    """Names of the Pods, in its namespace, for which it was prepared."""
    pod_uids: tuple[str, ...] = ()
    unidentified: tuple[str, ...] = ()
    """Names of Pods that pod-resources lists with it, and whose UIDs are not known yet."""
    joined: bool = False
    """Whether each container has all of its requests, and so the environment of all devices. The
    record has all fields by these names: a new name would need a new version of it."""
    devices: tuple[PreparedDevice, ...]

    @property
    def holder(self) -> str:
        """The holder for people: ``Pod default/train (ResourceClaim default/train-npu)``."""
        return f"Pod {self.namespace}/{self.pods[0]} ({self})" if self.pods else str(self)

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"

    def holder_by_uid(self, uid: str) -> str:
        """The holder for people, with the Pod of this UID, if it is known which one that is."""
        names = dict(zip(self.pod_uids, self.pods, strict=False))
        if len(self.pods) != len(self.pod_uids) or uid not in names:
            return self.holder
        return replace(self, pods=(names[uid],)).holder

    @property
    def footprints(self) -> tuple[Footprint, ...]:
        """Footprints of its devices, without those with admin access."""
        return tuple(device.footprint for device in self.devices if not device.admin)

    def assignment(self, device: PreparedDevice, pod: str, container: str = "") -> Assignment:
        return Assignment(self.namespace, pod, container, self.driver, device.device, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocation: a device that is in use, or may be."""

    footprints: tuple[Footprint, ...]
    """The cores that it may stand for; empty: any."""
    containers: tuple[Assignment, ...] = ()
    """The holders that pod-resources named last."""
    by: str = "a container that starts"
    """The holder, for people, while pod-resources names none."""
    since: float
    """Answers requested earlier say nothing about this allocation."""
    kept_until: float = 0.0
    """An earlier answer does not end it."""
    first_absent: float | None = None
    """When the first answer without it was asked for. Only a second one ends it: a kubelet that has
    just started does not list its Pods yet."""
    pod_uids: frozenset[str] = frozenset()
    """The Pods that the kubelet had for this device since it began."""
    unlisted: bool = False
    """Whether one of them was on the node without being listed, as while an init container has the
    device."""

    @property
    def holder(self) -> str:
        if not self.containers:
            return self.by
        return f"Pod {self.containers[0].pod_name}"

    def after_absence(self, asked_at: float, patience: float = SETTLED) -> Allocation | None:
        """Applies an answer that lacks it; None: absent for `patience` seconds."""
        if asked_at < max(self.since, self.kept_until):
            return self
        if self.first_absent is None:
            return replace(self, first_absent=asked_at)
        return self if asked_at < self.first_absent + patience else None

    def after_unlisted(
        self, answer: _Answer, name: DeviceName, orphaned: Collection[str]
    ) -> Allocation | None:
        """Applies an answer that does not list it; None: it has ended.

        Args:
            answer: what the kubelet says, and the host of its Pods.
            name: the device.
            orphaned: its Pods that run, and of which the kubelet lists no device.
        """
        held = self
        if answer.asked_at >= held.since:
            uids = answer.pods.get(name, _NONE)
            noted = uids & answer.cgroups.keys()
            if noted and not orphaned:
                # The kubelet keeps it for a Pod that is there: its init container may start late,
                # as after a volume, and may start again.
                in_grace_period = answer.asked_at < held.kept_until
                return replace(
                    held,
                    by=_by_uid(noted),
                    unlisted=True,
                    first_absent=None,
                    kept_until=held.kept_until if in_grace_period else 0.0,
                )
            if noted and not held.containers:
                held = replace(held, unlisted=True)
            elif held.unlisted and not orphaned:  # the Pod has ended
                held = replace(held, kept_until=0.0)
            elif uids and not (held.containers or held.kept_until):
                # The record does not say when it was granted: its Pod may have no cgroup yet.
                held = replace(held, kept_until=held.since + UNSEEN)
        return held.after_absence(answer.asked_at, HOLDER_ENDS if orphaned else SETTLED)

    def with_grace_period(self, until: float) -> Allocation:
        return replace(self, first_absent=None, kept_until=max(self.kept_until, until))


_FREE = Allocation(footprints=(), since=0.0)
"""In place of an allocation where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedPod:
    """A Pod that the kubelet no longer lists while its containers run, and what it was given.

    After a delete by force it is not listed for seconds, and for ever if it cannot be killed. The
    kubelet then treats its devices as free, and unprepares its claims (k8s.io/kubernetes,
    pkg/kubelet/cm/dra/manager.go, `reconcileLoop`).
    """

    footprints: tuple[Footprint, ...]
    by: str
    by_claim: bool
    since: float
    """Only a later answer ends it."""


@dataclass(frozen=True, slots=True)
class PublishedCard:
    """A card that a ResourceSlice of the API server may have."""

    driver: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Cores of a present card that a container holds: what metrics, pages and tables show."""

    card_id: str
    cores: CoreRange
    assignment: Assignment


def cores_by_card(usages: Iterable[Usage]) -> Mapping[str, frozenset[int]]:
    """Returns the cores that containers hold, by the card's ID."""
    held: dict[str, frozenset[int]] = {}
    for usage in usages:
        held[usage.card_id] = held.get(usage.card_id, frozenset()).union(usage.cores)
    return held


class _Answer(NamedTuple):
    """An answer of pod-resources, and what the host knows of the Pods then."""

    asked_at: float
    listed: Mapping[DeviceName, Sequence[Assignment]]
    pods: Mapping[DeviceName, frozenset[str]]
    """UIDs of each device in the kubelet's checkpoint."""
    listed_pods: frozenset[str]
    """UIDs of the Pods that have a listed device."""
    cgroups: Mapping[str, bool]
    """As `Ledger.with_answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The allocations at one moment. Every method returns a new value."""

    offered: Mapping[DeviceName, Footprint] = field(default_factory=dict)
    """The devices offered now; some may already be in use."""
    allocations: Mapping[DeviceName, Allocation] = field(default_factory=dict)
    unreadable: Allocation | None = None
    """Stands for all earlier grants while the record cannot be read."""
    prepared: Mapping[str, PreparedClaim] = field(default_factory=dict)
    orphans: Mapping[str, OrphanedPod] = field(default_factory=dict)
    """By UID; by ``namespace/name`` where that is not known."""
    cards: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The keys of each card by its ID, which it keeps over restarts."""
    published: Mapping[str, PublishedCard] = field(default_factory=dict)
    """By ID, the cards that a ResourceSlice may have, from before it is written until the API
    server has confirmed the slices without them."""

    def with_grant(self, resource: str, devices: Iterable[Device], now: float) -> Ledger:
        """Adds the grant of an Allocate, which replaces the devices' holders."""
        granted = {
            DeviceName(resource, device.id): Allocation(
                footprints=(footprint(device),), since=now + SETTLED, kept_until=now + UNSEEN
            )
            for device in devices
        }
        return replace(self, allocations={**self.allocations, **granted})

    def with_answer(
        self,
        assignments: Iterable[Assignment],
        asked_at: float,
        *,
        cards: Iterable[Card],
        resources: Collection[str],
        pods: Mapping[DeviceName, frozenset[str]] = MappingProxyType({}),
        cgroups: Mapping[str, bool] = MappingProxyType({}),
    ) -> Ledger:
        """Applies an answer of pod-resources that was asked for at `asked_at`.

        Args:
            assignments: all that it lists.
            asked_at: when it was asked for.
            cards: those present now; IDs that no record explains are matched against theirs.
            resources: the names under which cards are handed out. An assignment of another
                resource matters only if its ID is one that a present card can have.
            pods: the UIDs of the Pods that have each device, as the kubelet's checkpoint has them.
            cgroups: of the `orphan_candidates` of this answer, by UID, those with a cgroup:
                whether it has a process.
        """
        listed: dict[DeviceName, list[Assignment]] = {}
        for assignment in assignments:
            listed.setdefault(assignment.name, []).append(assignment)
        answer = _Answer(
            asked_at=asked_at,
            listed=listed,
            pods=pods,
            listed_pods=_NONE.union(*(pods.get(name, _NONE) for name in listed)),
            cgroups=cgroups,
        )
        hardware = tuple(cards)
        unlisted = {name: uids for name, uids in pods.items() if name not in listed}
        ledger = _without_ended_orphans(self, answer)
        ledger = ledger.with_checkpoint(
            unlisted, cgroups.keys(), asked_at, cards=hardware, resources=resources
        )
        ledger = _with_listed(ledger.with_pods(pods), answer, hardware, resources)
        ledger = _after_absences(ledger, answer)
        unreadable = self.unreadable and self.unreadable.after_absence(asked_at)
        return replace(ledger, unreadable=unreadable)

    def with_checkpoint(
        self,
        pods: Mapping[DeviceName, frozenset[str]],
        present: Collection[str],
        now: float,
        *,
        cards: Collection[Card],
        resources: Collection[str],
    ) -> Ledger:
        """Adds allocations for devices of the kubelet's checkpoint that nothing else explains.

        No list has a Pod that was deleted by force, nor the devices of an init container, and the
        record may be lost or older. An allocation whose card was absent gets its footprints when
        the card is present.

        Args:
            pods: as `with_answer`, without the devices that pod-resources lists.
            present: those of these Pods whose cgroup exists. It is there, without a process, before
                a Pod's volumes are.
            now: an earlier answer does not end these allocations.
            cards: those present now.
            resources: the names under which cards are handed out.
        """
        allocations = dict(self.allocations)
        for name, held in self.allocations.items():
            if not held.footprints and (meant := footprints_of(name.device, cards)):
                allocations[name] = replace(held, footprints=_sorted(meant))
        for name, uids in pods.items():
            noted = uids.intersection(present)
            if name in allocations or not noted:
                continue
            meant = footprints_of(name.device, cards)
            orphans = [self.orphans[uid] for uid in noted if uid in self.orphans]
            explained = len(orphans) == len(noted) and all(
                meant.issubset(orphan.footprints) for orphan in orphans
            )
            if (meant or name.resource in resources) and not explained:
                allocations[name] = Allocation(
                    footprints=_sorted(meant), by=_by_uid(noted), since=now, pod_uids=noted
                )
        return replace(self, allocations=allocations)

    def with_uses(self, uses: Iterable[Assignment]) -> Ledger:
        """Returns a ledger in which each claim knows the Pods that pod-resources lists with it.

        The kubelet does not prepare a claim again for a Pod that comes to share it, and says no
        UIDs: such a Pod is `PreparedClaim.unidentified`.
        """
        users: dict[tuple[str, str, str], set[Assignment]] = {}
        for use in uses:
            users.setdefault((use.resource, use.namespace, use.claim), set()).add(use)
        prepared = dict(self.prepared)
        for uid, claim in self.prepared.items():
            devices = {device.device for device in claim.devices}
            of_claim = users.get((claim.driver, claim.namespace, claim.name), ())
            # Another claim of the same name has other devices.
            names = {use.pod for use in of_claim if use.device in devices}
            if joined := names.difference(claim.pods, claim.unidentified):
                unidentified = (*claim.unidentified, *sorted(joined))
                prepared[uid] = replace(claim, unidentified=unidentified)
        return replace(self, prepared=prepared)

    def with_pods(self, pods: Mapping[DeviceName, frozenset[str]]) -> Ledger:
        """Returns a ledger with the Pod UIDs of each device in the kubelet's checkpoint."""
        changed = {
            name: replace(hold, pod_uids=hold.pod_uids | pods[name])
            for name, hold in self.allocations.items()
            if not pods.get(name, _NONE) <= hold.pod_uids
        }
        return replace(self, allocations={**self.allocations, **changed})

    def has_pods_beyond(self, before: Ledger) -> bool:
        """Whether it knows of a Pod of an allocation that `before` does not know of."""
        return any(
            not hold.pod_uids <= before.allocations.get(name, _FREE).pod_uids
            for name, hold in self.allocations.items()
        )

    def orphan_candidates(
        self, listed: Collection[DeviceName], pods: Mapping[DeviceName, frozenset[str]]
    ) -> frozenset[str]:
        """Returns UIDs of Pods that may have what an answer with `listed` lacks."""
        absent = (hold.pod_uids for name, hold in self.allocations.items() if name not in listed)
        noted = (uids for name, uids in pods.items() if name not in listed)
        return frozenset(self.orphans).union(*absent, *noted)

    def with_orphans(
        self, uids: Iterable[str], held: Allocation | PreparedClaim, now: float
    ) -> Ledger:
        """Returns a ledger with Pods that run although the kubelet treats their devices as free."""
        orphans = dict(self.orphans)
        for uid in uids:
            footprints = orphans[uid].footprints if uid in orphans else ()
            holder = _by_uid([uid])
            if isinstance(held, PreparedClaim):
                holder = held.holder_by_uid(uid)
            elif held.containers:
                holder = held.holder
            orphans[uid] = OrphanedPod(
                footprints=_sorted({*footprints, *held.footprints}),
                by=_with_remark(holder, "not listed by the kubelet, but its containers still run"),
                by_claim=isinstance(held, PreparedClaim),
                since=now,
            )
        return replace(self, orphans=orphans)

    def with_unidentified(self, claim: PreparedClaim, now: float) -> Ledger:
        """Returns a ledger in which the `unidentified` Pods of a claim that ends keep its cores."""
        orphans = dict(self.orphans)
        for pod in claim.unidentified if claim.footprints else ():
            holder = replace(claim, pods=(pod,)).holder
            orphans[f"{claim.namespace}/{pod}"] = OrphanedPod(
                footprints=claim.footprints,
                by=_with_remark(holder, "its UID is not known, so its containers may still run"),
                by_claim=True,
                since=now + UNIDENTIFIED,
            )
        return replace(self, orphans=orphans)

    def with_claim(self, claim: PreparedClaim) -> Ledger:
        return replace(self, prepared={**self.prepared, claim.uid: claim})

    def before_replacing(
        self, claim: PreparedClaim, running: Collection[str], now: float
    ) -> Ledger:
        """Returns the ledger before a claim is prepared again, perhaps for other devices or Pods.

        A kubelet does that after its restart, without an unprepare (k8s.io/kubernetes,
        pkg/kubelet/cm/dra/claiminfo.go, `newClaimInfoFromState`). Of the Pods from before, those
        that are `running` keep what they had, or what `claim` lacks of it if it is for them.
        """
        ledger = self
        before = self.prepared.get(claim.uid)
        if before is None:  # it was unprepared meanwhile
            return self
        for uid in (uid for uid in before.pod_uids if uid in running):
            kept = set(claim.footprints if uid in claim.pod_uids else ())
            if uid in self.orphans:
                kept.update(self.orphans[uid].footprints)
            left = [device for device in before.devices if device.footprint not in kept]
            lost = replace(before, devices=tuple(left))
            if lost.footprints:
                ledger = ledger.with_orphans([uid], lost, now)
        strangers = set(before.unidentified).difference(claim.pods, claim.unidentified)
        lost = replace(before, unidentified=tuple(sorted(strangers)))
        return ledger.with_unidentified(lost, now)

    def has_claim(self, use: Assignment) -> bool:
        """Whether a claim is prepared for the device of this use."""
        return any(
            (claimed.namespace, claimed.name) == (use.namespace, use.claim)
            and use.device in {device.device for device in claimed.devices}
            for claimed in self.prepared.values()
        )

    def without_claim(self, uid: str) -> Ledger:
        return replace(self, prepared={k: v for k, v in self.prepared.items() if k != uid})

    def with_published(self, driver: str, cards: Iterable[CardState]) -> Ledger:
        published = dict(self.published)
        for state in cards:
            before = published[state.id].keys if state.id in published else _NONE
            published[state.id] = PublishedCard(driver, keys_of(state.card) | before)
        return replace(self, published=published)

    def without_published(self, ids: Collection[str]) -> Ledger:
        left = {id_: card for id_, card in self.published.items() if id_ not in ids}
        return replace(self, published=left)

    def is_published(self, id_: str, card: Card) -> bool:
        """Whether a slice may have this card, under this ID or another one."""
        keys = keys_of(card)
        return id_ in self.published or any(keys & card.keys for card in self.published.values())

    def with_grace_period(self, until: float) -> Ledger:
        """Starts a grace period: no answer asked for before `until` ends an allocation."""
        return replace(
            self,
            allocations={k: hold.with_grace_period(until) for k, hold in self.allocations.items()},
            unreadable=self.unreadable and self.unreadable.with_grace_period(until),
        )

    def with_offer(
        self, devices: Mapping[str, Iterable[Device]], cards: Iterable[CardState]
    ) -> Ledger:
        """Returns a ledger with the offered devices, by resource, and the present cards."""
        offered = {
            DeviceName(resource, device.id): footprint(device)
            for resource, listed in devices.items()
            for device in listed
        }
        # With the name, for people: it is missed by that if it does not come back.
        known = {
            state.id: keys_of(state.card) | {f"name:{state.card.family}-{state.card.index}"}
            for state in cards
        }
        return replace(self, offered=offered, cards=known)

    def with_predecessor(self, before: Ledger, now: float) -> Ledger:
        """Returns a ledger with the possible grants of the previous agent, its `for_successor`.

        All of it counts as held until two answers, asked for from `now` on, lack it.
        """
        allocations = dict(self.allocations)
        for name, held in before.for_successor().allocations.items():
            ours = allocations.get(name, _FREE)
            allocations[name] = Allocation(
                footprints=_sorted({*held.footprints, *ours.footprints}),
                containers=ours.containers,
                by="a container from before the agent's start",
                since=max(now, ours.since),
                kept_until=ours.kept_until,
                pod_uids=held.pod_uids | ours.pod_uids,
            )
        orphans = {
            uid: replace(orphan, since=now + (UNIDENTIFIED if "/" in uid else 0.0))
            for uid, orphan in before.orphans.items()
        }
        ledger = replace(
            self,
            allocations=allocations,
            prepared={**before.prepared, **self.prepared},
            orphans={**orphans, **self.orphans},
            cards={**before.cards, **self.cards},
            published={**before.published, **self.published},
        )
        return ledger.with_unreadable_record(now) if before.unreadable else ledger

    def for_successor(self) -> Ledger:
        """Returns the state for the next agent: everything offered may be held by then."""
        footprints = {name: {mark} for name, mark in self.offered.items()}
        for name, held in self.allocations.items():
            footprints.setdefault(name, set()).update(held.footprints)
        allocations = {
            name: Allocation(
                footprints=_sorted(known),
                since=0.0,
                pod_uids=self.allocations.get(name, _FREE).pod_uids,
            )
            for name, known in footprints.items()
        }
        orphans = {uid: replace(orphan, since=0.0) for uid, orphan in self.orphans.items()}
        return replace(self, offered={}, allocations=allocations, orphans=orphans)

    def in_both(self, other: Ledger) -> Ledger:
        """Returns what two states for the next agent (`for_successor`) have in common."""
        allocations = {}
        for name, held in self.allocations.items():
            theirs = other.allocations.get(name, _FREE)
            allocations[name] = replace(
                held,
                footprints=tuple(mark for mark in held.footprints if mark in theirs.footprints),
                pod_uids=held.pod_uids & theirs.pod_uids,
            )
        published = dict(self.published.items() & other.published.items())
        return replace(self, allocations=allocations, published=published)

    def covers(self, resource: str, devices: Iterable[Device]) -> bool:
        """Whether this state for the next agent has the grant of these devices."""
        return all(
            footprint(device)
            in self.allocations.get(DeviceName(resource, device.id), _FREE).footprints
            for device in devices
        )

    def with_unreadable_record(self, now: float) -> Ledger:
        """Marks the record as unreadable: anything may be held, until two answers."""
        by = "an unknown holder (the agent's record of earlier grants cannot be read)"
        return replace(self, unreadable=Allocation(footprints=(), by=by, since=now))

    @property
    def idle(self) -> bool:
        return not (self.allocations or self.unreadable or self.prepared or self.orphans)

    @property
    def pending_release(self) -> bool:
        """Whether another answer of pod-resources would soon end an allocation.

        A grant that none has shown yet counts: of a Pod that ends before it is seen, the cores
        are kept for `UNSEEN` seconds. After these, an init container may have it for days.
        """
        held = [*self.allocations.values(), *([self.unreadable] if self.unreadable else [])]
        return bool(self.orphans) or any(
            hold.first_absent is not None
            or not (hold.containers or (hold.unlisted and not hold.kept_until))
            for hold in held
        )

    def conflicts(
        self,
        cards: Iterable[Card],
        *,
        without: Collection[str] = (),
    ) -> Conflicts:
        """Returns the conflicts: what must not be allocated while these cards are present.

        Args:
            cards: all of them.
            without: names of devices for which claims do not count.
        """
        conflicts = Conflicts(cards, self.unreadable)
        for name, held in self.allocations.items():
            conflicts.add(name, held.holder, held.footprints)
        for uid, orphan in self.orphans.items():
            conflicts.add(PodHolder(uid), orphan.by, orphan.footprints)
        for claim in self.prepared.values():
            footprints = [
                device.footprint
                for device in claim.devices
                if not device.admin and device.device not in without
            ]
            if footprints:
                conflicts.add(ClaimHolder(claim.uid), claim.holder, footprints)
        return conflicts

    def usages(
        self, cards: Iterable[CardState], uses: Iterable[Assignment] = ()
    ) -> tuple[Usage, ...]:
        """The cores of present cards that containers hold, as pod-resources said last."""
        present = [(keys_of(state.card), state) for state in cards]
        usages = []
        for held in self.allocations.values():
            best = _best(held.footprints, present)
            if best and held.first_absent is None and not held.unlisted:
                usages += [Usage(best[0].id, best[1], holder) for holder in held.containers]
        users: dict[tuple[str, str], list[Assignment]] = {}
        for use in uses:
            users.setdefault((use.namespace, use.claim), []).append(use)
        for claim in self.prepared.values():
            named = users.get((claim.namespace, claim.name), [])
            for device in claim.devices:
                best = None if device.admin else _best([device.footprint], present)
                if best:
                    holders = _assigned(claim, device, named)
                    usages += [Usage(best[0].id, best[1], holder) for holder in holders]
        return tuple(sorted(usages, key=lambda usage: usage.assignment))


def _without_ended_orphans(ledger: Ledger, answer: _Answer) -> Ledger:
    """Drops the orphans that run no longer, or are listed again with a device."""
    orphans = {
        uid: orphan
        for uid, orphan in ledger.orphans.items()
        if answer.asked_at <= orphan.since
        or (answer.cgroups.get(uid) and (orphan.by_claim or uid not in answer.listed_pods))
    }
    return replace(ledger, orphans=orphans)


def _with_listed(
    ledger: Ledger, answer: _Answer, cards: Sequence[Card], resources: Collection[str]
) -> Ledger:
    """Adds what the answer lists, with its containers."""
    allocations = dict(ledger.allocations)
    for name, containers in answer.listed.items():
        held = allocations.get(name, _FREE)
        if answer.asked_at < held.since:
            continue  # granted meanwhile: this names the holder before
        footprints = set(held.footprints)
        if not footprints:
            footprints = footprints_of(name.device, cards)
            if name in ledger.offered:
                footprints.add(ledger.offered[name])
        if footprints or name.resource in resources:
            allocations[name] = Allocation(
                footprints=_sorted(footprints),
                containers=tuple(sorted(containers)),
                since=answer.asked_at,
                pod_uids=held.pod_uids | answer.pods.get(name, _NONE),
            )
    return replace(ledger, allocations=allocations)


def _after_absences(ledger: Ledger, answer: _Answer) -> Ledger:
    """Ends what the answer lacks, if nothing else says that it is held.

    What a Pod that runs on had, and the kubelet no longer lists, is an orphan's from then on.
    """
    running = frozenset(uid for uid, populated in answer.cgroups.items() if populated)
    allocations: dict[DeviceName, Allocation] = {}
    for name, held in ledger.allocations.items():
        if name in answer.listed and answer.asked_at >= held.since:
            allocations[name] = held
            continue
        orphaned = held.pod_uids.intersection(running) - answer.listed_pods
        left = held.after_unlisted(answer, name, orphaned)
        if left:
            allocations[name] = left
        elif orphaned and not held.footprints:
            allocations[name] = held  # an orphan has no ID by which its card could be known
        else:
            ledger = ledger.with_orphans(orphaned, held, answer.asked_at)
    return replace(ledger, allocations=allocations)


def _best(
    footprints: Iterable[Footprint], present: Sequence[tuple[frozenset[str], CardState]]
) -> tuple[CardState, CoreRange] | None:
    """Returns the card and the cores that the footprints most likely stand for."""
    alike = (
        (len(held.keys & keys), state, held.cores)
        for held in footprints
        for keys, state in present
        if held.keys & keys and state.card.all_cores.includes(held.cores)
    )
    best = max(alike, key=lambda match: match[0], default=None)
    return best and best[1:]


def _assigned(
    claim: PreparedClaim, device: PreparedDevice, uses: Iterable[Assignment]
) -> list[Assignment]:
    """Returns the containers that hold a device of a claim.

    A kubelet lists all of a claim's devices for each container that names one of its requests. So
    with several requests and several containers, it is not known which one has the device.
    """
    containers: dict[str, set[str]] = {pod: set() for pod in claim.pods}
    for use in uses:
        if use.device == device.device:
            containers.setdefault(use.pod, set()).add(use.container)
    several = len({device.request for device in claim.devices}) > 1
    return [
        claim.assignment(device, pod, name)
        for pod, names in sorted(containers.items())
        for name in ([""] if not names or (several and len(names) > 1) else sorted(names))
    ]


class Conflicts:
    """The allocations of a Ledger, indexed: a device is compared with few of them."""

    def __init__(self, cards: Iterable[Card], unreadable: Allocation | None) -> None:
        self._unreadable = unreadable
        self._shown: dict[Holder, str] = {}
        """The holders, for people."""
        self._by_mark: dict[str, dict[tuple[Holder, Footprint], None]] = {}
        """Footprints by key and by node; sets that keep their order."""
        self._unidentified: list[Holder] = []
        """Holders of which no footprint is known."""
        self._cards: dict[str, set[int]] = {}
        """The cards that have each key."""
        for number, card in enumerate(cards):
            for key in keys_of(card):
                self._cards.setdefault(key, set()).add(number)

    def add(self, holder: Holder, name: str, footprints: Collection[Footprint]) -> None:
        """Adds a holder once; without footprints it may hold anything."""
        self._shown[holder] = name
        if not footprints:
            self._unidentified.append(holder)
        for what in footprints:
            for mark in (*what.keys, *what.nodes):
                self._by_mark.setdefault(mark, {})[holder, what] = None

    def against(
        self, holder: Holder | None, device: Device, pods: Collection[str] = ()
    ) -> str | None:
        """Why `device` must not be given to this holder; None: no other one has any of it.

        What this holder has already does not count, nor what the orphaned `pods` keep that get the
        device now.
        """
        if self._unreadable:
            return f"{self._unreadable.holder} may hold its cores"
        own = {holder, *map(PodHolder, pods)}
        for other in self._unidentified:
            if other not in own:
                if not isinstance(other, DeviceName):
                    return f"{self._shown[other]} may hold its cores"
                name = f"{other.device} of {other.resource}"
                return f"{self._shown[other]} holds {name}, and no card here has that ID"
        wanted = footprint(device)
        near: dict[tuple[Holder, Footprint], None] = {}  # each of them once: most have many marks
        for mark in (*sorted(wanted.keys), *sorted(wanted.nodes)):
            near |= self._by_mark.get(mark, {})
        for other, what in near:
            if other not in own and (shared := self._shared(wanted, what)) is not None:
                reason = f"{self._shown[other]} still holds {shared}"
                if isinstance(other, DeviceName):
                    reason += f" as {other.device} of {other.resource}"
                return reason
        return None

    def _shared(self, wanted: Footprint, held: Footprint) -> str | None:
        """Describes the exclusive part that two footprints share, for people."""
        if wanted.keys & held.keys:
            if wanted.cores.overlaps(held.cores):
                return "its cores"
            # The cores of one card share nodes. That it is one card is sure only if no other card
            # says the same of itself, and nothing speaks against it.
            alike = {card for key in held.keys for card in self._cards.get(key, ())}
            if len(alike) == 1 and not contradict(wanted.keys, held.keys):
                return None
        nodes = wanted.nodes & held.nodes
        return f"/dev/{min(nodes)}" if nodes else None


def keys_of(card: Card) -> frozenset[str]:
    """Returns all that identifies a card: `Card.identities`, else its number."""
    return card.identities or frozenset({f"number:{card.family}-{card.index}"})


def absent(recorded: Mapping[str, frozenset[str]], seen: Iterable[CardState]) -> Mapping[str, str]:
    """The recorded cards that are none of these, by ID, with what people call them.

    ``npu6 (0000:85:00.0)``; a record of an earlier version has no names.
    """
    keys = frozenset[str]().union(*(keys_of(card.card) for card in seen))
    kinds = {id_: by_kind(its) for id_, its in recorded.items() if not its & keys}
    return {
        id_: (f"npu{by['name'].rpartition('-')[2]}" if "name" in by else id_)
        + (f" ({by['pci']})" if "pci" in by else "")
        for id_, by in kinds.items()
    }


def card_of(held: Footprint, cards: Iterable[CardState]) -> CardState | None:
    """Returns the present card that a footprint most likely stands for."""
    best = _best([held], [(keys_of(state.card), state) for state in cards])
    return best and best[0]


def footprint(device: Device) -> Footprint:
    return Footprint(keys_of(device.card), device.cores, frozenset(device.nodes))


def footprints_of(id_: str, cards: Iterable[Card]) -> set[Footprint]:
    """Returns the footprints by every device ID that these cards can have."""
    return {footprint for card in cards if (footprint := _meant(id_, card))}


def _meant(id_: str, card: Card) -> Footprint | None:
    """Returns the footprint of an ID of the card, in any shape, by any of its identifiers.

    A whole card's ID wins over a part's.
    """
    names = (card.uuid, card.serial, card.pci_bus_id, f"{card.family}-{card.index}")
    known = [name for name in names if name and id_.startswith(name)]
    if id_ in known:
        return Footprint(keys_of(card), card.all_cores, frozenset(card.access.nodes()))
    for first in range(card.core_count if known else 0):
        for last in range(first, card.core_count):
            cores = CoreRange(first, last)
            if id_ in [device_id(name, cores) for name in known]:
                nodes = card.access.nodes(None if cores == card.all_cores else cores)
                return Footprint(keys_of(card), cores, frozenset(nodes))
    return None


def contradict(one: frozenset[str], other: frozenset[str]) -> bool:
    ids = by_kind(one)
    other_ids = by_kind(other)
    return one != other and any(
        ids[kind] != other_ids[kind] for kind in ids.keys() & other_ids.keys()
    )


def _with_remark(holder: str, remark: str) -> str:
    """``Pod default/train (a remark)``; what the holder has in parentheses comes first."""
    opened = f"{holder[:-1]}; " if holder.endswith(")") else f"{holder} ("
    return f"{opened}{remark})"


def _by_uid(uids: Iterable[str]) -> str:
    return f"the Pod with the UID {min(uids)}"


def _sorted(footprints: Iterable[Footprint]) -> tuple[Footprint, ...]:
    return tuple(
        sorted(footprints, key=lambda mark: (sorted(mark.keys), mark.cores, sorted(mark.nodes)))
    )
