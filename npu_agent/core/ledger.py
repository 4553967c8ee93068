"""The ledger: who holds which cores. The one answer to that question, whoever asks.

No core, and no device node, may ever belong to two living holders. The kubelet knows devices by
resource and ID only. It does not know that a device of another shape or resource has the same
cores, that a card was renumbered, or that two cards say the same UUID. So the ledger keeps for
everything that was handed out what it stood for at that time: whose cores, and by which nodes. What
is about to be handed out is compared with that.

Start reading at `Ledger`. There are five sources:

- what was granted here (`Ledger.granted`), known at the moment of the grant;
- the kubelet's pod-resources API (`Ledger.answered`), which is late, absent after a restart of the
  kubelet, and silent about init containers;
- claims that were prepared here (`Ledger.with_claim`), which are held until they are unprepared;
- Pods that the kubelet no longer lists, but whose containers still run (`Ledger.ending`);
- the record on disk (`Ledger.recovered`), written before anything is offered, so that it covers
  every grant that an agent can have made before it was killed.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from npu_agent.core.claim import ClaimUse
from npu_agent.core.hardware import Access, Card, CardState, CoreRange
from npu_agent.core.offer import Device, device_id

SETTLED = 1.0
"""Seconds after an Allocate from which on an answer of pod-resources includes it: the kubelet notes
a device when it has the plugin's answer. Also between the two answers that end a hold."""
UNSEEN = 60.0
"""Seconds for which a grant that pod-resources never showed counts as held: the kubelet does not
list init containers, and lists a Pod only once it was admitted."""
HOLDER_ENDS = 10.0
"""Seconds that the containers of a Pod that was deleted by force have for their end: the kubelet
gives them two, and has taken four on a busy machine. After that the Pod counts as `Ledger.ending`,
and its device as unhealthy; a kubelet that knows that earlier would fail the next Pod, which can
wait in its Allocate."""

_NONE: frozenset[str] = frozenset()
_UNKNOWN = ("", "")
"""Stands for whatever was handed out before, where no record says what that was."""

Name = tuple[str, str]
"""Resource and device ID: what the kubelet knows a device by."""
CLAIM = "ResourceClaim"
"""In place of the resource in the `Name` of a prepared claim, with its UID; no resource has a name
without a domain."""
POD = "Pod"
"""In place of the resource in the `Name` of what `Ledger.ending` has, with the Pod's UID."""


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """A device that a container holds, in the kubelet's words."""

    namespace: str
    pod: str
    container: str
    """"" where it is not known which of a Pod's containers."""
    resource: str
    """Of a claim, the driver."""
    device: str
    """The device's ID, as the plugin advertised it; of a claim, its name in the pool."""
    claim: str = ""
    """The ResourceClaim by which it is held, in the Pod's namespace; "" by the device plugin."""

    @property
    def name(self) -> Name:
        """What the kubelet knows the device by."""
        return (self.resource, self.device)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a device ID stood for when it was offered."""

    keys: frozenset[str]
    """Everything that identified the card: see `keys_of`."""
    cores: CoreRange
    nodes: frozenset[str]
    """Device nodes, relative to /dev."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """A device of a prepared claim."""

    request: str
    """The request of the claim that it was allocated to."""
    pool: str
    device: str
    """Its name in the pool."""
    admin: bool = False
    """Whether it is for an administrator's Pod, beside whoever holds it: no holder of cores."""
    footprint: Footprint
    """What it stood for when the claim was prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedClaim:
    """A ResourceClaim whose devices Pods may use, until it is unprepared."""

    driver: str
    uid: str
    namespace: str
    name: str
    pods: tuple[str, ...] = ()
    """Names of the Pods that it was reserved for, in its namespace, when it was prepared."""
    pod_uids: tuple[str, ...] = ()
    """Their UIDs."""
    joined: bool = False
    """Whether each container has all of its requests, and so the environment of all devices."""
    devices: tuple[PreparedDevice, ...]

    @property
    def holder(self) -> str:
        """For people: ``Pod default/train (ResourceClaim default/train-npu)``."""
        claim = f"{CLAIM} {self.namespace}/{self.name}"
        return f"Pod {self.namespace}/{self.pods[0]} ({claim})" if self.pods else claim

    @property
    def footprints(self) -> tuple[Footprint, ...]:
        """Of its devices, without those that are for administrators only."""
        return tuple(one.footprint for one in self.devices if not one.admin)

    def hold(
        self, without: Collection[str] = (), besides: Collection[Footprint] = ()
    ) -> Hold | None:
        """What it keeps others from; None: nothing, as it has devices for administrators only.

        `without` are names of devices, and `besides` footprints, that do not count.
        """
        footprints = tuple(
            one.footprint
            for one in self.devices
            if not (one.admin or one.device in without or one.footprint in besides)
        )
        if not footprints:
            return None
        uids = frozenset(self.pod_uids)
        return Hold(footprints=footprints, by=self.holder, since=0.0, pod_uids=uids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A device that somebody holds, or may hold."""

    footprints: tuple[Footprint, ...]
    """What it may stand for; none: nobody knows, so it may be anything."""
    containers: tuple[Assignment, ...] = ()
    """The holders that pod-resources named last; none: see `by`."""
    by: str = "a container that starts"
    """The holder, for people, as long as pod-resources names none."""
    since: float
    """An answer that was asked for earlier says nothing of this hold."""
    kept_until: float = 0.0
    """An answer that was asked for earlier does not end it, even if it lacks it."""
    missed: float | None = None
    """When the first answer without it was asked for. It takes a second one to end the hold: a
    kubelet that has just started does not list its Pods yet."""
    pod_uids: frozenset[str] = frozenset()
    """The Pods that the kubelet had for this device since the hold began."""

    @property
    def holder(self) -> str:
        """For people: ``Pod default/train``."""
        if not self.containers:
            return self.by
        return f"Pod {self.containers[0].namespace}/{self.containers[0].pod}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a Pod was given that the kubelet no longer lists, while its containers still run.

    A Pod that was deleted by force is gone from the kubelet's lists seconds before its containers
    have ended, and for ever if one cannot be killed. Its devices are free for the kubelet then, and
    its claims are unprepared (k8s.io/kubernetes, pkg/kubelet/cm/dra/manager.go, `reconcileLoop`).
    """

    footprints: tuple[Footprint, ...]
    by: str
    """The Pod, for people."""
    by_claim: bool
    """Whether it was given them by a claim."""
    since: float
    """An answer that was asked for earlier does not end it."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """A card that a ResourceSlice of the API server may have."""

    driver: str
    keys: frozenset[str]
    """Of the card: see `keys_of`."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Cores of a present card that a container holds: what metrics, pages and tables show."""

    card_id: str
    cores: CoreRange
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Who holds what at one moment. Every method returns a new value."""

    offered: Mapping[Name, Footprint] = field(default_factory=dict)
    """What can be handed out now. Some of it may be held without anybody's having said so."""
    holds: Mapping[Name, Hold] = field(default_factory=dict)
    """What containers hold by the device plugin."""
    prepared: Mapping[str, PreparedClaim] = field(default_factory=dict)
    """The claims that are prepared, by UID."""
    ending: Mapping[str, Ending] = field(default_factory=dict)
    """The Pods that still have devices although the kubelet no longer lists them, by UID."""
    cards: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The keys of each card by its ID: a card keeps its ID over restarts."""
    sliced: Mapping[str, Sliced] = field(default_factory=dict)
    """By their IDs, the cards that a ResourceSlice may have: noted before it is written, and until
    the API server has confirmed the slices without it."""

    def granted(self, resource: str, devices: Iterable[Device], now: float) -> Ledger:
        """After an Allocate. The kubelet gives a device away only once its last holder has gone."""
        holds = {
            (resource, device.id): Hold(
                footprints=(footprint(device),), since=now + SETTLED, kept_until=now + UNSEEN
            )
            for device in devices
        }
        return replace(self, holds={**self.holds, **holds})

    def answered(
        self,
        assignments: Iterable[Assignment],
        asked_at: float,
        *,
        cards: Iterable[Card],
        resources: Collection[str],
        pods: Mapping[Name, frozenset[str]] = MappingProxyType({}),
        living: Collection[str] = (),
    ) -> Ledger:
        """After an answer of pod-resources that was asked for at `asked_at`.

        Args:
            assignments: all that it lists.
            asked_at: when it was asked for.
            cards: those present now; IDs that no record explains are matched against theirs.
            resources: the names under which cards are handed out. An assignment of another
                resource matters only if its ID is one that a present card can have.
            pods: the UIDs of the Pods that have each device, as the kubelet notes them.
            living: those of the `suspects` of this answer whose containers run.
        """
        listed: dict[Name, list[Assignment]] = {}
        for one in assignments:
            listed.setdefault(one.name, []).append(one)
        present = tuple(cards)
        holds: dict[Name, Hold] = {}
        for name, containers in listed.items():
            hold = self.holds.get(name)
            if hold is not None and asked_at < hold.since:
                continue  # granted meanwhile: this names the holder before
            known = set(hold.footprints if hold else ())
            if not known:
                known = footprints_of(name[1], present)
                if name in self.offered:
                    known.add(self.offered[name])
            if known or name[0] in resources:
                holds[name] = Hold(
                    footprints=_sorted(known),
                    containers=tuple(sorted(containers)),
                    since=asked_at,
                    pod_uids=(hold.pod_uids if hold else frozenset()) | pods.get(name, _NONE),
                )
        back = {uid for name in listed for uid in pods.get(name, ())}
        ending = {
            uid: one
            for uid, one in self.ending.items()
            if asked_at < one.since or (uid in living and (one.by_claim or uid not in back))
        }
        ledger = replace(self, ending=ending)
        for name, hold in self.noted(pods).holds.items():
            if name in holds:
                continue
            if asked_at < max(hold.since, hold.kept_until):
                holds[name] = hold
            elif hold.missed is None:
                holds[name] = replace(hold, missed=asked_at)
            else:
                living_on = hold.pod_uids.intersection(living) - back
                if asked_at < hold.missed + (HOLDER_ENDS if living_on else SETTLED):
                    holds[name] = hold
                else:
                    ledger = ledger.outlived(living_on, hold, asked_at)
        ledger = replace(ledger, holds=holds)
        return self if ledger == self else ledger

    def noted(self, pods: Mapping[Name, frozenset[str]]) -> Ledger:
        """With what the kubelet has noted of the Pods that have each device, as of `answered`."""
        changed = {
            name: replace(hold, pod_uids=hold.pod_uids | pods[name])
            for name, hold in self.holds.items()
            if not pods.get(name, _NONE) <= hold.pod_uids
        }
        return replace(self, holds={**self.holds, **changed}) if changed else self

    def suspects(
        self, listed: Collection[Name], pods: Mapping[Name, frozenset[str]]
    ) -> frozenset[str]:
        """The UIDs of Pods of which it matters whether they live, after an answer with `listed`.

        `pods` is as of `answered`.
        """
        missing = (hold for name, hold in self.noted(pods).holds.items() if name not in listed)
        return frozenset(self.ending).union(*(hold.pod_uids for hold in missing))

    def outlived(
        self, uids: Iterable[str], hold: Hold, now: float, *, by_claim: bool = False
    ) -> Ledger:
        """With Pods, by UID, that live on although the kubelet takes what they hold for free."""
        ending = dict(self.ending)
        for uid in uids:
            before = ending[uid].footprints if uid in ending else ()
            holder = hold.holder if hold.containers or by_claim else f"the Pod with the UID {uid}"
            opened = f"{holder[:-1]}; " if holder.endswith(")") else f"{holder} ("
            ending[uid] = Ending(
                footprints=_sorted({*before, *hold.footprints}),
                by=f"{opened}not listed by the kubelet, but its containers run)",
                by_claim=by_claim,
                since=now,
            )
        return self if ending == self.ending else replace(self, ending=ending)

    def with_claim(self, claim: PreparedClaim) -> Ledger:
        """After a claim was prepared, or prepared again."""
        if self.prepared.get(claim.uid) == claim:
            return self
        return replace(self, prepared={**self.prepared, claim.uid: claim})

    def replacing(self, claim: PreparedClaim, living: Collection[str], now: float) -> Ledger:
        """Before a claim is prepared again, perhaps with another allocation or for other Pods.

        A kubelet does that after its restart, without an unprepare (k8s.io/kubernetes,
        pkg/kubelet/cm/dra/claiminfo.go, `newClaimInfoFromState`). Pods from before that live keep
        what they had: those that `claim` is for only what it lacks, the others all of it.

        Args:
            claim: what is to be prepared.
            living: of the Pods that it was prepared for before, by UID, those whose containers run.
            now: the time.
        """
        ledger, before = self, self.prepared.get(claim.uid)
        for uid in before.pod_uids if before else ():
            kept = claim.footprints if uid in claim.pod_uids else ()
            lost = before and uid in living and before.hold(besides=kept)
            if lost and not ledger.keeps(uid, lost.footprints):
                ledger = ledger.outlived([uid], lost, now, by_claim=True)
        return ledger

    def has_claim(self, use: ClaimUse) -> bool:
        """Whether a claim is prepared for the device that a container uses by it."""
        claim = (use.claim_namespace, use.claim_name)
        return any(
            (one.namespace, one.name) == claim
            and use.device in {each.device for each in one.devices}
            for one in self.prepared.values()
        )

    def keeps(self, uid: str, footprints: Iterable[Footprint]) -> bool:
        """Whether `ending` has all this for a Pod."""
        return uid in self.ending and set(footprints).issubset(self.ending[uid].footprints)

    def without_claim(self, uid: str) -> Ledger:
        """After a claim was unprepared; one that is unknown changes nothing."""
        if uid not in self.prepared:
            return self
        return replace(self, prepared={k: v for k, v in self.prepared.items() if k != uid})

    def slicing(self, driver: str, cards: Iterable[CardState]) -> Ledger:
        """With cards that the driver is about to publish in slices."""
        fresh = {
            state.id: Sliced(driver, keys_of(state.card) | self._keys_in_slices(state.id))
            for state in cards
        }
        merged = {**self.sliced, **fresh}
        return self if merged == self.sliced else replace(self, sliced=merged)

    def _keys_in_slices(self, id_: str) -> frozenset[str]:
        return self.sliced[id_].keys if id_ in self.sliced else frozenset()

    def unsliced(self, ids: Collection[str]) -> Ledger:
        """After the API server has confirmed the slices without these cards."""
        if self.sliced.keys().isdisjoint(ids):
            return self
        left = {id_: one for id_, one in self.sliced.items() if id_ not in ids}
        return replace(self, sliced=left)

    def in_slices(self, id_: str, card: Card) -> bool:
        """Whether a slice may have this card, under this ID or another one."""
        if not self.sliced:
            return False
        keys = keys_of(card)
        return id_ in self.sliced or any(keys & one.keys for one in self.sliced.values())

    def doubted(self, until: float) -> Ledger:
        """After a restart of the kubelet: no answer asked for before `until` ends a hold."""
        holds = {
            name: replace(hold, missed=None, kept_until=max(hold.kept_until, until))
            for name, hold in self.holds.items()
        }
        return replace(self, holds=holds)

    def offering(
        self, devices: Mapping[str, Iterable[Device]], cards: Iterable[CardState]
    ) -> Ledger:
        """With these devices, by resource, as what can be handed out, and these cards present."""
        offered = {
            (resource, device.id): footprint(device)
            for resource, listed in devices.items()
            for device in listed
        }
        known = {state.id: keys_of(state.card) for state in cards}
        if offered == self.offered and known == self.cards:
            return self
        return replace(self, offered=offered, cards=known)

    def recovered(self, before: Ledger, now: float) -> Ledger:
        """With what an agent before this one may have handed out: its `for_the_next`.

        Until two answers of pod-resources, asked for from `now` on, lack it, all of it counts as
        held.
        """
        holds = dict(self.holds)
        for name, held in before.for_the_next().holds.items():
            ours = holds.get(name)
            holds[name] = Hold(
                footprints=_sorted({*held.footprints, *(ours.footprints if ours else ())}),
                containers=ours.containers if ours else (),
                by="a container from before the agent's start",
                since=max(now, ours.since if ours else now),
                kept_until=ours.kept_until if ours else 0.0,
                pod_uids=held.pod_uids | (ours.pod_uids if ours else _NONE),
            )
        ending = {uid: replace(one, since=now) for uid, one in before.ending.items()}
        return replace(
            self,
            holds=holds,
            prepared={**before.prepared, **self.prepared},
            ending={**ending, **self.ending},
            cards={**before.cards, **self.cards},
            sliced={**before.sliced, **self.sliced},
        )

    def for_the_next(self) -> Ledger:
        """What an agent after this one has to know: all that is offered may be held by then."""
        footprints = {name: {one} for name, one in self.offered.items()}
        for name, hold in self.holds.items():
            footprints.setdefault(name, set()).update(hold.footprints)
        holds = {
            name: Hold(
                footprints=_sorted(known),
                since=0.0,
                pod_uids=self.holds[name].pod_uids if name in self.holds else _NONE,
            )
            for name, known in footprints.items()
        }
        return replace(self, offered={}, holds=holds)

    def after_unknown(self, now: float) -> Ledger:
        """After an agent whose record cannot be read: anything may be held, as of `recovered`."""
        by = "whoever was given devices before (the agent's record of that cannot be read)"
        return replace(self, holds={**self.holds, _UNKNOWN: Hold(footprints=(), by=by, since=now)})

    @property
    def doubtful(self) -> bool:
        """Whether another answer of pod-resources, soon, would end a hold."""
        return bool(self.ending) or any(hold.missed is not None for hold in self.holds.values())

    def conflicts(
        self,
        cards: Iterable[Card],
        *,
        held: bool = True,
        prepared: bool = True,
        without: Collection[str] = (),
    ) -> Conflicts:
        """What is not to be handed out while these cards are present.

        Args:
            cards: all of them.
            held: with what containers hold by the device plugin.
            prepared: with what claims hold.
            without: names of devices of which it does not matter that claims hold them.
        """
        found = Conflicts(self.holds if held else {}, cards)
        for uid, one in self.ending.items():
            if prepared if one.by_claim else held:
                found.add((POD, uid), Hold(footprints=one.footprints, by=one.by, since=one.since))
        for claim in self.prepared.values() if prepared else ():
            if hold := claim.hold(without):
                found.add((CLAIM, claim.uid), hold)
        return found

    @property
    def unsure(self) -> bool:
        """Whether the record of what was handed out before cannot be read."""
        return _UNKNOWN in self.holds

    def holdings(
        self, cards: Iterable[CardState], uses: Iterable[ClaimUse] = ()
    ) -> tuple[Holding, ...]:
        """The cores of present cards that containers hold, as pod-resources said last."""
        present = [(keys_of(state.card), state) for state in cards]
        found = []
        for hold in self.holds.values():
            if hold.missed is None and hold.containers:
                best = _best(hold.footprints, present)
                found += [Holding(*best, one) for one in hold.containers] if best else []
        users: dict[tuple[str, str], list[ClaimUse]] = {}
        for use in uses:
            users.setdefault((use.claim_namespace, use.claim_name), []).append(use)
        for claim in self.prepared.values():
            named = users.get((claim.namespace, claim.name), [])
            for device in claim.devices:
                best = None if device.admin else _best([device.footprint], present)
                if best:
                    found += [Holding(*best, one) for one in _assigned(claim, device, named)]
        return tuple(sorted(found, key=lambda one: one.assignment))


def _best(
    footprints: Iterable[Footprint], present: Sequence[tuple[frozenset[str], CardState]]
) -> tuple[str, CoreRange] | None:
    """The card, by its ID, and the cores that one of the footprints most likely stands for."""
    alike = (
        (len(held.keys & keys), held.cores, state)
        for held in footprints
        for keys, state in present
        if held.keys & keys and state.card.all_cores.includes(held.cores)
    )
    best = max(alike, key=lambda one: one[0], default=None)
    return best and (best[2].id, best[1])


def _assigned(
    claim: PreparedClaim, device: PreparedDevice, uses: Iterable[ClaimUse]
) -> list[Assignment]:
    """The containers that hold a device of a claim.

    A kubelet lists all devices of a claim for each container that names any of its requests. So
    where a claim has several requests and a Pod several containers with it, it is not known which
    of them has the device.
    """
    containers: dict[str, set[str]] = {pod: set() for pod in claim.pods}
    for use in uses:
        if use.device == device.device:
            containers.setdefault(use.pod, set()).add(use.container)
    several = len({one.request for one in claim.devices}) > 1
    return [
        Assignment(claim.namespace, pod, name, claim.driver, device.device, claim.name)
        for pod, names in sorted(containers.items())
        for name in ([""] if not names or (several and len(names) > 1) else sorted(names))
    ]


@dataclass(slots=True, eq=False)
class _Held:
    """A footprint that somebody holds. One is no other: it is found under each of its marks."""

    name: Name
    what: Footprint
    by: Hold


class Conflicts:
    """The holds of a Ledger, arranged so that a device is compared with few of them."""

    def __init__(self, holds: Mapping[Name, Hold], cards: Iterable[Card]) -> None:
        self._held: dict[tuple[Name, Footprint], _Held] = {}
        self._by_mark: dict[str, dict[_Held, None]] = {}
        """By each key and each node of what is held."""
        self._anything: list[tuple[Name, Hold]] = []
        """What nobody knows the cores of."""
        self._cards: dict[str, set[int]] = {}
        """Which of the cards say each key."""
        for number, card in enumerate(cards):
            for key in keys_of(card):
                self._cards.setdefault(key, set()).add(number)
        for name, hold in holds.items():
            self.add(name, hold)

    def add(self, name: Name, hold: Hold) -> None:
        """Takes one more hold into account, or again one that is known."""
        if not hold.footprints:
            self._anything.append((name, hold))
        for what in hold.footprints:
            if known := self._held.get((name, what)):
                known.by = hold
                continue
            held = self._held[name, what] = _Held(name, what, hold)
            for mark in (*what.keys, *what.nodes):
                self._by_mark.setdefault(mark, {})[held] = None

    def against(self, itself: Name, device: Device, pods: Collection[str] = ()) -> str | None:
        """Why `device` must not be handed out; None: no other holder has any of it.

        What is held under the name `itself` is no conflict: the kubelet knows of that holder. Nor
        is what a Pod keeps, as `Ledger.ending` has it, that is given the device: `pods`, by UID.
        """
        own = {itself, *((POD, uid) for uid in pods)}
        for name, hold in self._anything:
            if name == _UNKNOWN:
                return f"{hold.holder} may hold its cores"
            if name not in own:
                return f"{hold.holder} holds {name[1]} of {name[0]}, and no card here has that ID"
        wanted = footprint(device)
        near: dict[_Held, None] = {}  # each of them once: most have many marks
        for mark in (*sorted(wanted.keys), *sorted(wanted.nodes)):
            near |= self._by_mark.get(mark, {})
        for held in near:
            name = held.name
            if name not in own and (what := self._shared(wanted, held.what)) is not None:
                known_as = "" if name[0] in (CLAIM, POD) else f" as {name[1]} of {name[0]}"
                return f"{held.by.holder} still holds {what}{known_as}"
        return None

    def _shared(self, wanted: Footprint, held: Footprint) -> str | None:
        """What two footprints have in common that only one holder may have, for people."""
        if wanted.keys & held.keys:
            if wanted.cores.overlaps(held.cores):
                return "its cores"
            # The cores of one card share nodes. That it is one card is sure only if no other card
            # says the same of itself, and nothing speaks against it.
            alike = {card for key in held.keys for card in self._cards.get(key, ())}
            if len(alike) == 1 and not _contradict(wanted.keys, held.keys):
                return None
        nodes = wanted.nodes & held.nodes
        return f"/dev/{min(nodes)}" if nodes else None


def keys_of(card: Card) -> frozenset[str]:
    """Everything that identifies a card: `Card.identities`, else its number."""
    return card.identities or frozenset({f"number:{card.family}-{card.index}"})


def card_of(held: Footprint, cards: Iterable[CardState]) -> str | None:
    """The ID of the card that a footprint most likely stands for; None: it is not present."""
    best = _best([held], [(keys_of(state.card), state) for state in cards])
    return best and best[0]


def part_of(held: Footprint, cards: Collection[CardState]) -> CoreRange | None:
    """The cores of that card, if they are not all of them."""
    card_id = card_of(held, cards)
    whole = next((each.card.all_cores for each in cards if each.id == card_id), held.cores)
    return None if held.cores == whole else held.cores


def footprint(device: Device) -> Footprint:
    """What `device` stands for now."""
    return Footprint(keys_of(device.card), device.cores, frozenset(device.nodes))


def footprints_of(id_: str, cards: Iterable[Card]) -> set[Footprint]:
    """What a device ID can stand for, matched against every ID that these cards can have."""
    return {found for card in cards if (found := _meant(id_, card))}


def _meant(id_: str, card: Card) -> Footprint | None:
    """What an ID stands for if the card can have it, under whatever shape and part of its identity.

    A whole card's ID wins over a part's: which of two cards is meant, `footprints_of` leaves open.
    """
    names = (card.uuid, card.serial, card.pci_bus_id, f"{card.family}-{card.index}")
    known = [name for name in names if name and id_.startswith(name)]
    if id_ in known:
        return Footprint(keys_of(card), card.all_cores, frozenset(card.access.nodes()))
    for name in known:
        part = _parts(card.access, card.core_count).get(id_.removeprefix(name))
        if part:
            return Footprint(keys_of(card), *part)
    return None


@lru_cache(128)
def _parts(access: Access, count: int) -> dict[str, tuple[CoreRange, frozenset[str]]]:
    """All neighbouring cores of a card that has `count`, by the end of their ID, and their nodes.

    The next card in its place has the same.
    """
    ranges = [CoreRange(first, last) for first in range(count) for last in range(first, count)]
    return {
        device_id("", cores): (
            cores,
            frozenset(
                (
                    *access.shared_nodes,
                    *(access.whole_nodes if len(cores) == count else ()),
                    *(node for covered, node in access.core_nodes if cores.includes(covered)),
                )
            ),
        )
        for cores in ranges
    }


def _contradict(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether both say something of one kind, and not the same."""
    if one == other:
        return False
    mine = dict(key.split(":", 1) for key in one)
    its = dict(key.split(":", 1) for key in other)
    return any(mine[kind] != its[kind] for kind in mine.keys() & its.keys())


def _sorted(footprints: Iterable[Footprint]) -> tuple[Footprint, ...]:
    return tuple(
        sorted(footprints, key=lambda one: (sorted(one.keys), one.cores, sorted(one.nodes)))
    )
