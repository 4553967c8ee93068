"""What may be handed out now, and why not: decided here for both APIs. Pure.

Start reading at `device_lists`, which the device plugin serves, and `claim_pool`, which DRA
publishes. `check_grant`, and `claim_devices` with `check_prepare`, decide once more when a
container or a claim is about to get devices: what was listed may have changed by then.

All decide from `Facts`, which are true until the next await.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Card, CardState, HealthState, Snapshot
from npu_agent.core.ledger import (
    ClaimHolder,
    Conflicts,
    DeviceName,
    Holder,
    Ledger,
    PreparedClaim,
    PublishedCard,
    footprint,
    keys_of,
)
from npu_agent.core.offer import Device, Resource, advertise, cut, names
from npu_agent.core.pool import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimRef,
    Description,
    DraSpec,
    Effect,
    PoolDevice,
    Taint,
    pool,
)
from npu_agent.core.state import COUNTERS, INFORMATIVE, TAINTS, SlicesState
from npu_agent.core.trends import TrendKind

RECOVERING = "claims that are in use are missing from the agent's record: it is recovering them"
"""Why nothing is granted while `Facts.recovering` has a driver."""
DEGRADED = "degraded"
"""The attribute of a degraded card: ``errors,hot``. Selectors of claims can read no taints."""


@dataclass(frozen=True, slots=True)
class PluginWishes:
    """What the config asks of the device plugin."""

    resources: tuple[Resource, ...]
    disabled: frozenset[str]
    """Names of cards that are not offered on this node."""
    families: Collection[str]
    """Those that the device plugin offers; the others are for claims, or it is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraWishes:
    """What the config asks of a DRA driver."""

    families: frozenset[str]
    """Families that DRA offers on this node; empty: only present claims are served."""
    decided: bool = True
    """Whether all of these are known; else the slices stay as they are."""
    disabled: Collection[str] = frozenset()
    """Names of cards that are not offered on this node, in lower case."""
    by_index: bool = False
    partitions: bool = False
    """As `pool` takes it."""
    impossible: str | None = ""
    """Why this node cannot do DRA; "": it can; None: the API server has not said."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the node at one moment."""

    snapshot: Snapshot
    ledger: Ledger
    cordons: Mapping[str, str] = field(default_factory=dict)
    """The cards that a person has taken out of service, by ID, and the reasons."""
    recovering: Collection[str] = ()
    """Drivers of claims in use that no record has: until they are found, their cores are
    unknown."""
    degraded: Mapping[str, Collection[TrendKind]] = field(default_factory=dict)
    """Remarks on working cards, by ID."""
    evicting: Collection[str] = frozenset()
    """The unhealthy cards whose Pods are to end now, by ID: `npu_agent.core.evictions`."""

    @cached_property
    def cards(self) -> list[Card]:
        return [state.card for state in self.snapshot.cards]

    @cached_property
    def conflicts(self) -> Conflicts:
        return self.ledger.conflicts(self.cards)


def device_lists(facts: Facts, wishes: PluginWishes) -> dict[str, tuple[Device, ...]]:
    """The devices to list for each resource; those that no container may get now are unhealthy.

    Cards for claims are listed while a container holds them: a kubelet restarts no container whose
    resource has no plugin.
    """
    lists: dict[str, tuple[Device, ...]] = {}
    for resource in wishes.resources:
        devices = []
        for device in advertise(facts.snapshot, resource, wishes.disabled):
            name = DeviceName(resource.name, device.id)
            if device.card.family in wishes.families or name in facts.ledger.allocations:
                reason = _withheld(facts, wishes, name, device)
                devices.append(_unhealthy(device, reason) if reason else device)
        lists[resource.name] = tuple(devices)
    return lists


def withheld(published: Iterable[Device], planned: Collection[Device]) -> tuple[Device, ...]:
    """Returns published devices, without what the plan for their resource no longer offers.

    Those of a card that is not planned are gone, and those that are planned as unhealthy are that
    already. What is planned in another shape, or as healthy again, stays as it is.
    """
    cards = {device.card_id for device in planned}
    unhealthy = {device.id: device for device in planned if not device.healthy}
    return tuple(
        unhealthy.get(device.id, device) for device in published if device.card_id in cards
    )


def without_specs(
    devices: Iterable[Device], unwritten: Collection[str], error: str | None
) -> tuple[Device, ...]:
    """Returns the devices; those whose CDI spec is not on disk, by ID, are unhealthy."""
    reason = f"the CDI specs cannot be written: {error}"
    return tuple(
        _unhealthy(device, reason) if device.id in unwritten else device for device in devices
    )


def _unhealthy(device: Device, reason: str) -> Device:
    return replace(device, healthy=False, reason=reason)


def _withheld(facts: Facts, wishes: PluginWishes, name: DeviceName, device: Device) -> str | None:
    """Why no container may get this device now; None: it may.

    Another holder may have any of its cores or nodes under another name, as after a change of
    shape, number or identity; a ResourceSlice of an earlier agent may have its card.
    """
    if facts.recovering:
        return RECOVERING
    if device.card.family not in wishes.families:
        holder = facts.ledger.allocations[name].holder
        return f"the device plugin does not offer its card (allocation.api); {holder} keeps it"
    if facts.ledger.is_published(device.card_id, device.card):
        return "a ResourceSlice may still offer its card to claims"
    if held := facts.conflicts.against(name, device):
        return held
    reason = facts.cordons.get(device.card_id)
    return None if reason is None else f"cordoned: {reason}"


def cards_for_claims(snapshot: Snapshot, wishes: DraWishes) -> Iterator[CardState]:
    for state in snapshot.cards:
        if state.card.family in wishes.families and names(state).isdisjoint(wishes.disabled):
            yield state


def claim_pool(
    facts: Facts,
    wishes: DraWishes,
    dra: DraSpec,
    families: Collection[str],
    *,
    unwritten: Collection[str],
    slices: SlicesState,
) -> tuple[PoolDevice, ...]:
    """The devices that a driver publishes, with taints: those of cards that are on disk as such.

    Args:
        facts: the cards, and who holds what.
        wishes: the config.
        dra: the driver's names.
        families: all of the vendor's: a name is unique among their cards.
        unwritten: IDs of published cards that are not on disk as they are now.
        slices: what the API server's slices can express.
    """
    on_disk = published_by(facts.ledger, dra.driver).difference(unwritten)
    on_disk &= {state.id for state in cards_for_claims(facts.snapshot, wishes)}
    devices = [
        device
        for device in pool(
            facts.snapshot,
            dra=dra,
            families=families,
            by_index=wishes.by_index,
            partitions=wishes.partitions and not slices.uncounted,
            # Cards that are cut are in several slices, which would all have to be written.
            last=() if wishes.partitions else facts.degraded,
        )
        if device.device.card_id in on_disk
    ]
    # The scheduler counts the cores of claims for devices that it sees, and of no others: cards are
    # no longer cut, have other names, or are left out because they would have a taint.
    seen = {
        device.name
        for device in devices
        if not slices.untainted
        or (device.device.healthy and device.device.card_id not in facts.cordons)
    }
    conflicts = facts.ledger.conflicts(facts.cards, without=seen)
    return tuple(
        replace(
            device,
            description=_remarked(device, facts),
            taints=taints(
                dra.driver,
                device.device,
                evict=device.device.card_id in facts.evicting,
                held=conflicts.against(None, device.device) is not None,
                cordoned=device.device.card_id in facts.cordons,
                trends=facts.degraded.get(device.device.card_id, ()),
            ),
        )
        for device in devices
    )


def _remarked(device: PoolDevice, facts: Facts) -> Description:
    """The description, with what is degraded."""
    kinds = sorted(kind.value for kind in facts.degraded.get(device.device.card_id, ()))
    remark = {DEGRADED: ",".join(kinds)} if kinds else {}
    attributes = {**device.description.attributes, **remark}
    return replace(device.description, attributes=attributes)


def expressible(devices: Iterable[PoolDevice], dropped: Collection[str]) -> tuple[PoolDevice, ...]:
    """Returns the devices that can be in slices of an API server that drops these fields."""
    if not COUNTERS.isdisjoint(dropped):
        # Without counters the scheduler would allocate each core several times.
        devices = [replace(device, counters=None) for device in devices if not device.is_part]
    if TAINTS in dropped:
        # Without its taint a device would be allocated. Who holds it keeps it.
        devices = [device for device in devices if not device.barred]
    if INFORMATIVE in dropped or TAINTS in dropped:
        devices = [
            replace(device, taints=tuple(t for t in device.taints if t.effect is not Effect.NONE))
            for device in devices
        ]
    return tuple(devices)


def taints(
    driver: str,
    device: Device,
    *,
    evict: bool = False,
    held: bool = False,
    cordoned: bool = False,
    trends: Collection[TrendKind] = (),
) -> tuple[Taint, ...]:
    """The taints of a device; `held` is for holders of which the scheduler does not know."""
    kinds: list[tuple[str, Effect]] = []
    if not device.healthy:
        kinds.append(("unhealthy", Effect.NO_EXECUTE if evict else Effect.NO_SCHEDULE))
    if held:
        kinds.append(("held", Effect.NO_SCHEDULE))
    if cordoned:
        kinds.append(("cordoned", Effect.NO_SCHEDULE))
    kinds += ((kind, Effect.NONE) for kind in sorted(trend.value for trend in trends))
    return tuple(Taint(key=f"{driver}/{key}", effect=effect) for key, effect in kinds)


def is_needed(facts: Facts, wishes: DraWishes, driver: str) -> bool:
    """Whether a driver has cards to offer, claims to serve, or slices to take back."""
    return bool(
        wishes.families
        or driver in facts.recovering
        or any(claim.driver == driver for claim in facts.ledger.prepared.values())
        or published_by(facts.ledger, driver)
    )


def published_by(ledger: Ledger, driver: str) -> set[str]:
    """The IDs of the cards that a driver's slices may have."""
    return {id_ for id_, card in ledger.published.items() if card.driver == driver}


def unwritten(ledger: Ledger, driver: str, recorded: Mapping[str, PublishedCard]) -> set[str]:
    """The IDs of a driver's published cards that are not in `recorded`, or otherwise there."""
    lacking = ledger.published.items() - recorded.items()
    return {id_ for id_, card in lacking if card.driver == driver}


def withdrawn(
    facts: Facts, wishes: DraWishes, driver: str, confirmed: Iterable[PoolDevice]
) -> set[str]:
    """The IDs of cards that have left a driver's slices, which have these devices now."""
    stay = {device.device.card_id for device in confirmed}
    stay |= {state.id for state in cards_for_claims(facts.snapshot, wishes)}
    return published_by(facts.ledger, driver) - stay


def check_cordon(facts: Facts, device: Device) -> None:
    """Raises RefusalError if the device's card is cordoned."""
    if (reason := facts.cordons.get(device.card_id)) is not None:
        raise _unfit(device, f"is cordoned: {reason}")


def check_grant(
    facts: Facts, resource: str, devices: Iterable[Device], listed: Iterable[Device]
) -> None:
    """Raises RefusalError if a container must not get these devices of the device plugin.

    `listed` are those that the resource has at this moment: an Allocate may have waited since it
    was asked for, and the config, or a card, may have changed.
    """
    if facts.recovering:
        raise RefusalError(Refusal.UNFIT, RECOVERING)
    now = {device.id: device for device in listed}
    for device in devices:
        check_cordon(facts, device)
        _check_free(facts, DeviceName(resource, device.id), device)
        for state in facts.snapshot.cards:
            # It may have failed while its last Pod was waited for.
            if state.id == device.card_id and state.health.state is HealthState.UNHEALTHY:
                raise _unfit(device, f"is unhealthy: {state.health.reason}")
        if device.id not in now or footprint(now[device.id]) != footprint(device):
            raise _unfit(
                device,
                "is no longer listed: while its Allocate waited it was disabled, cut into other "
                "parts, or moved to DRA",
            )
        if not now[device.id].healthy:
            raise _unfit(device, f"is unhealthy: {now[device.id].reason}")


def claim_devices(
    facts: Facts,
    ref: ClaimRef,
    claim: AllocatedClaim,
    *,
    driver: str,
    pool: str,
    devices: Mapping[str, Device],
) -> tuple[Device, ...]:
    """The devices of a claim, in its order.

    If it is prepared, its Pods may have them already: only what no scheduler allocates is refused.
    An administrator may have come to see why a device is out of service.

    Args:
        facts: the cards, and who holds what.
        ref: the claim that the kubelet means.
        claim: the claim that was read.
        driver: the driver whose devices it has.
        pool: the name of this node's pool.
        devices: all devices of this node by their names in the pool, offered or not.

    Raises:
        RefusalError: no Pod of this claim must get them, even if all are free.
    """
    prepared = ref.uid in facts.ledger.prepared
    _check_allocation(driver, ref, claim, prepared=prepared)
    pairs = [(use, _of_node(claim, use.pool, use.name, pool, devices)) for use in claim.devices]
    own = [(use, device) for use, device in pairs if not use.admin]
    if not prepared:
        if facts.recovering:
            raise RefusalError(Refusal.UNFIT, RECOVERING)
        for use, device in own:
            _check_in_service(facts, driver, use, device)
    _check_overlap(claim, own)
    return tuple(device for _, device in pairs)


def recorded_devices(
    claim: PreparedClaim, *, pool: str, devices: Mapping[str, Device]
) -> tuple[Device, ...]:
    """The devices that the Pods of a claim were given; `pool` and `devices` as of `claim_devices`.

    Raises:
        RefusalError: its cards are gone, or have other nodes now.
    """
    given = tuple(_of_node(claim, use.pool, use.device, pool, devices) for use in claim.devices)
    if [device.footprint for device in claim.devices] != [footprint(device) for device in given]:
        raise RefusalError(Refusal.UNFIT, f"{claim} has other device nodes than its cards have now")
    return given


def _check_allocation(driver: str, ref: ClaimRef, claim: AllocatedClaim, *, prepared: bool) -> None:
    """Raises RefusalError if this is another claim, or not one for the driver and a Pod."""
    if claim.uid != ref.uid:
        raise RefusalError(
            Refusal.UNKNOWN,
            f"{ref} has the UID {claim.uid} and not {ref.uid}: it was deleted and made again; "
            "delete the Pod",
        )
    if not claim.devices:
        raise RefusalError(
            Refusal.UNFIT, f"no device of the driver {driver} is allocated to {ref} (any more)"
        )
    if claim.parameters and not prepared:  # Pods that were given their devices keep them
        raise RefusalError(
            Refusal.INVALID,
            f"{ref} has opaque parameters ({', '.join(claim.parameters)}) for the driver {driver}, "
            "which takes none: remove them from spec.devices.config of the ResourceClaim or its "
            "ResourceClaimTemplate, or from spec.config of the DeviceClass, and create the claim "
            "and its Pod again",
        )
    if not claim.pods:
        raise RefusalError(
            Refusal.UNFIT, f"{ref} is reserved for no Pod: its Pod has ended, or was deleted"
        )


def _of_node(
    claim: AllocatedClaim | PreparedClaim,
    pool: str,
    name: str,
    here: str,
    devices: Mapping[str, Device],
) -> Device:
    """Returns the device of this name; raises RefusalError if it is not in the pool `here`."""
    device = devices.get(name)
    if device and pool == here:
        return device
    raise RefusalError(
        Refusal.UNKNOWN,
        f"{claim} has the device {name} of the pool {pool}, which this node does not have (any "
        "more): its card was removed or has another name now; delete the Pod, so that another "
        "device is allocated",
    )


def _check_in_service(facts: Facts, driver: str, use: AllocatedDevice, device: Device) -> None:
    """Raises RefusalError if the device is unhealthy or cordoned, and that is not tolerated."""
    if not device.healthy and not use.tolerates(f"{driver}/unhealthy"):
        what = f"device {use.name} ({device.name}) is unhealthy: {device.reason}"
        raise RefusalError(Refusal.UNFIT, what)
    if not use.tolerates(f"{driver}/cordoned"):
        check_cordon(facts, device)


def _check_overlap(claim: AllocatedClaim, own: Sequence[tuple[AllocatedDevice, Device]]) -> None:
    """Raises RefusalError if a claim has a core by two devices."""
    for number, (use, device) in enumerate(own):
        for other, taken in own[:number]:
            if device.card_id == taken.card_id and device.cores.overlaps(taken.cores):
                raise RefusalError(
                    Refusal.INVALID,
                    f"{claim} has the same cores twice: by {other.name} and by {use.name}; check "
                    "whether its status was written by hand",
                )


def check_prepare(facts: Facts, claim: PreparedClaim, devices: Iterable[Device]) -> None:
    """Raises RefusalError if a claim's Pods must not get these devices, theirs alone."""
    before = facts.ledger.prepared.get(claim.uid)
    same_pods = before is not None and set(claim.pod_uids) <= set(before.pod_uids)
    for device in devices:
        # A Pod that lives on with what these Pods have too was a Pod of this claim.
        shared = same_pods and before and footprint(device) in before.footprints
        pods = facts.ledger.orphans if shared else claim.pod_uids
        _check_free(facts, ClaimHolder(claim.uid), device, pods)


def _check_free(facts: Facts, holder: Holder, device: Device, pods: Collection[str] = ()) -> None:
    """Raises RefusalError if the device is not free for this holder and these Pods."""
    card = device.card
    if not any(card.key == here.key and keys_of(card) == keys_of(here) for here in facts.cards):
        raise _unfit(device, "is not free: its card was just removed or renumbered")
    if reason := facts.conflicts.against(holder, device, pods):
        raise _unfit(device, f"is not free: {reason}", Refusal.HELD)


def _unfit(device: Device, why: str, kind: Refusal = Refusal.UNFIT) -> RefusalError:
    return RefusalError(kind, f"device {device.id!r} ({device.name}) {why}")


def holders(facts: Facts, cards: Iterable[CardState]) -> dict[str, str]:
    """The possible holders of these cards, by ID; free cards are left out."""
    by_id = {}
    for state in cards:
        (whole,) = cut(state, state.card.core_count)
        if holder := facts.conflicts.against(None, whole):
            by_id[state.id] = holder
    return by_id
