"""Why a Pod waits, or where it could be scheduled now, as the scheduler would judge it. Pure.

A sentence, then a line for each Node with what rules it out. Of a Pod that has a Node: its devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from npu_agent.kube.objects import (
    ClaimDevices,
    ClaimSpec,
    Container,
    Meta,
    Node,
    Plain,
    Pod,
    ResourceClaim,
    condition,
)
from npu_agent.people.cluster.allocation import Devices, GivesUpError, Search
from npu_agent.people.cluster.cel import CannotJudgeError
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.quantity import number, quantity
from npu_agent.people.cluster.scheduling import (
    Kind,
    Reason,
    Scheduling,
    extended,
    matches_selector,
    requests,
    volume_claims,
)
from npu_agent.people.cluster.shortage import shortages
from npu_agent.text import closest, listed, natural, one_line

_DEFAULT = "default-scheduler"
_NAMED = 5
"""Nodes, or resources, that a sentence names; more are counted."""
_MOST_CONSUMERS = 256
"""Pods that may share a claim."""
_PHRASES = {
    Kind.NOT_OFFERED: "no Node that it may use offers what it asks for",
    Kind.SELECTION: "no Node is one that its node selector and affinity allow",
    Kind.TAINT: "each Node that it may use is cordoned or has a taint that it does not tolerate",
    Kind.TOO_BIG: "it asks for more than any Node has",
    Kind.SELECTOR: "no device is one that it asks for",
    Kind.GIVEN_UP: "the scheduler fails at its claims",
    Kind.UNHEALTHY: "too few devices are healthy and in service",
    Kind.DEVICE_TAINT: "devices that it could have are tainted",
    Kind.CONSTRAINT: "no devices on one Node meet its constraints",
    Kind.ELSEWHERE: "what it already has is on a Node that it cannot use",
    Kind.RESOURCES: "too little is free",
    Kind.IN_USE: "all that it requests is in use",
    Kind.UNKNOWN: "the reason is unknown",
}


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """The verdict on one Node for a Pod."""

    node: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    """What rules nothing out, and may explain it."""

    @property
    def fits(self) -> bool | None:
        """None: it is not known."""
        if not self.reasons:
            return True
        return None if all(one.kind is Kind.UNKNOWN for one in self.reasons) else False

    @property
    def worst(self) -> Reason:
        """The reason that a person reads first."""
        return min(self.reasons, key=lambda one: one.kind)

    def __str__(self) -> str:
        unknown = [one.text for one in self.reasons if one.kind is Kind.UNKNOWN]
        known = sorted((one for one in self.reasons if one.kind is not Kind.UNKNOWN), key=_kind)
        parts = [one.text for one in known]
        if unknown:
            parts.append(f"cannot be judged here: {', '.join(unknown)}")
        if self.fits:
            parts.append("could take it now")
        return "; ".join([*parts, *self.notes])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a Pod waits, or where it is."""

    sentence: str
    nodes: tuple[NodeVerdict, ...] = ()
    schedulable: bool | None = False
    """Whether it could be scheduled now; None: it is not known."""
    details: tuple[str, ...] = field(default=())
    """More lines on the Pod itself."""

    @property
    def fitting(self) -> list[str]:
        """The Nodes that could take it now."""
        return [one.node for one in self.nodes if one.fits] if self.schedulable else []


def why(pod: Pod, cluster: Cluster) -> Verdict:
    """The answer for a Pod, from the objects alone."""
    if pod.ended:
        return Verdict(f"Pod {pod.key} has ended: its phase is {pod.status.phase}.")
    if pod.metadata.deletion_timestamp:
        return Verdict(f"Pod {pod.key} is being deleted.")
    if pod.spec.node_name:
        return _placed(pod, cluster)
    asks = asks_for(pod)
    extra = () if asks else ("It asks for no NPU and no other device.",)
    if waits := next(_before_nodes(pod, cluster), None):
        return Verdict(f"Pod {pod.key} waits: {waits}.", details=extra)
    nodes, schedulable = _Judge(pod, cluster).verdicts()
    sentence = _sentence(pod, nodes, schedulable, cluster)
    return Verdict(sentence, nodes, schedulable, extra)


def asks_for(pod: Pod) -> list[str]:
    """The devices that a Pod asks for: resources with their number, and claims."""
    found = [f"{number(amount)} {name}" for name, amount in requests(pod).items() if extended(name)]
    return [*found, *(f"claim {one.name}" for one in pod.spec.resource_claims)]


class _Judge:
    """Judges all Nodes for one Pod."""

    def __init__(self, pod: Pod, cluster: Cluster) -> None:
        self._pod, self._cluster = pod, cluster
        self._scheduling, self._devices = Scheduling(cluster), Devices(cluster)
        named = set(pod.claims)
        self._claims = [
            one for one in cluster.claims if one.namespace == pod.namespace and one.name in named
        ]
        order = {name: at for at, name in enumerate(pod.claims)}
        self._claims.sort(key=lambda one: order[one.name])
        self._names = {
            name: class_
            for name in requests(pod)
            if extended(name) and (class_ := self._devices.by_extended_name(name))
        }

    def verdicts(self) -> tuple[tuple[NodeVerdict, ...], bool | None]:
        """Returns the verdict on each Node, and whether the Pod could be scheduled now."""
        nodes = [
            NodeVerdict(node.name, tuple(self._reasons(node)), tuple(self._notes(node)))
            for node in sorted(self._cluster.nodes, key=lambda one: natural(one.name))
        ]
        failed = [each for each in nodes if _only(each, Kind.GIVEN_UP, Kind.UNKNOWN)]
        if any(_only(each, Kind.GIVEN_UP) for each in failed):
            return tuple(_given_up(each, failed[0].node) for each in nodes), False
        if any(one.kind is Kind.GIVEN_UP for each in failed for one in each.reasons):
            return tuple(nodes), None
        fits = [each.fits for each in nodes]
        # What is not known of one Node may be what makes the scheduler give up at all of them.
        return tuple(nodes), None if None in fits else True in fits

    def _reasons(self, node: Node) -> Iterator[Reason]:
        mapped = [
            name for name in self._names if not quantity(node.status.allocatable.get(name, "0"))
        ]
        yield from self._scheduling.reasons(self._pod, node, mapped)
        claims = [*self._claims]
        if mapped:
            claims.append(_extended_claim(self._pod, {name: self._names[name] for name in mapped}))
        for claim in claims:
            chosen = claim.status.allocation and claim.status.allocation.node_selector
            if chosen and not matches_selector(node, chosen):
                what = f"claim {claim.name} is allocated, and its devices are not there"
                yield Reason(Kind.ELSEWHERE, what)
        yield from self._allocation(node, [one for one in claims if not one.status.allocation])

    def _allocation(self, node: Node, claims: Sequence[ResourceClaim]) -> Iterator[Reason]:
        if not claims:
            return
        try:
            if not Search(self._devices, node, claims).run():
                yield from shortages(self._devices, node, claims)
        except GivesUpError as error:
            yield Reason(Kind.GIVEN_UP, f"the scheduler fails here: {error}")
        except CannotJudgeError as error:
            yield Reason(Kind.UNKNOWN, str(error))

    def _notes(self, node: Node) -> Iterator[str]:
        """Yields remarks of agent and Node, and on the API by which the Node offers its cards."""
        for one in node.status.conditions:
            if one.type.endswith("/NPUReady") and one.status == "False":
                yield one_line(f"{one.type} is False: {one.message or one.reason}")
        if cordoned := node.metadata.annotations.get("npu-agent/cordoned"):
            yield one_line(f"cards are cordoned: {cordoned}", 120)
        for agent in self._scheduling.of(node):
            ready = condition(agent.status.conditions, "Ready")
            if agent.is_agent and (ready is None or ready.status != "True"):
                yield f"its agent, Pod {agent.key}, is not ready"
        yield from self._other_api(node)

    def _other_api(self, node: Node) -> Iterator[str]:
        wanted = {name for name in requests(self._pod) if extended(name)}
        offered = {name for name, amount in node.status.allocatable.items() if quantity(amount)}
        devices = self._devices.of(node)
        if any(taint.key.endswith("/moving") for one in devices for taint in one.taints):
            yield "its cards are moving to the device plugin"
        lacking = wanted - offered - set(self._names)
        if lacking and devices:
            what = "its cards are offered by DRA, and no DeviceClass has the extendedResourceName"
            yield f"{what} {', '.join(sorted(lacking))}"
        if self._claims and not devices and (plain := sorted(filter(extended, offered))):
            yield f"its devices are offered by a device plugin, as {', '.join(plain)}"


def _only(verdict: NodeVerdict, *kinds: Kind) -> bool:
    return bool(verdict.reasons) and all(one.kind in kinds for one in verdict.reasons)


def _given_up(verdict: NodeVerdict, node: str) -> NodeVerdict:
    """A Node that would do, had the scheduler not given the Pod up at another one."""
    if verdict.reasons:
        return verdict
    what = f"would do, but the scheduler gives the Pod up for what fails on {node}"
    return replace(verdict, reasons=(Reason(Kind.GIVEN_UP, what),))


def _extended_claim(pod: Pod, classes: Mapping[str, str]) -> ResourceClaim:
    """The claim that the scheduler makes for resources that DRA serves.

    Source: createRequestsAndMappings in dynamicresources/extendeddynamicresources.go.
    """
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    short = [
        at for at, one in enumerate(pod.spec.init_containers) if one.restart_policy != "Always"
    ]
    made: list[Plain] = []
    for name in sorted(classes):
        lasting = {
            at: _devices_of(one, name) for at, one in enumerate(containers) if at not in short
        }
        # An init container uses what later containers have, and only wants what it lacks.
        more = {
            at: _devices_of(containers[at], name) - sum(n for i, n in lasting.items() if i > at)
            for at in short
        }
        most = max(more, key=lambda at: (more[at], -at), default=None)
        counts = {**lasting, **({most: more[most]} if most is not None else {})}
        for at, count in counts.items():
            if count > 0:
                place = sorted(containers[at].resources.requests).index(name)
                exactly = {"deviceClassName": classes[name], "count": count}
                made.append({"name": f"container-{at}-request-{place}", "exactly": exactly})
    made.sort(key=lambda one: str(one["name"]))
    meta = Meta(name=f"{pod.name}-extended-resources", namespace=pod.namespace)
    return ResourceClaim(meta, spec=ClaimSpec(ClaimDevices(tuple(made))))


def _devices_of(container: Container, name: str) -> int:
    return int(quantity(container.resources.requests.get(name, "0")))


def _before_nodes(pod: Pod, cluster: Cluster) -> Iterator[str]:
    """Yields what blocks the Pod before any Node is tried."""
    if gates := [one.get("name", "") for one in pod.spec.scheduling_gates]:
        yield f"it has the scheduling gates {', '.join(gates)}, which must be removed first"
    yield from _claims(pod, cluster)
    yield from _unbound(pod, cluster)
    if pod.spec.scheduler_name != _DEFAULT and not condition(pod.status.conditions, "PodScheduled"):
        what = "no scheduler of that name has tried it"
        yield f"its schedulerName is {pod.spec.scheduler_name}, and {what}"
    if not cluster.nodes:
        yield cluster.refused.get("Node", "the cluster has no Nodes").rstrip(".")


def _claims(pod: Pod, cluster: Cluster) -> Iterator[str]:
    there = {one.name: one for one in cluster.claims if one.namespace == pod.namespace}
    templates = {one.name: one for one in cluster.templates if one.namespace == pod.namespace}
    made = {one.name: one.resource_claim_name for one in pod.status.resource_claim_statuses}
    for wanted in pod.spec.resource_claims:
        name, template = wanted.resource_claim_name, wanted.resource_claim_template_name
        if template and wanted.name not in made:
            if template not in templates:
                yield f"ResourceClaimTemplate {template} of its claim {wanted.name} does not exist"
                continue
            full = next(_full_quotas(pod.namespace, cluster), None)
            why_not = f": {full}" if full else ", which takes a moment"
            yield f"claim {wanted.name} is not created yet from template {template}{why_not}"
            continue
        name = name or made.get(wanted.name)
        if name is None:
            continue
        claim = there.get(name)
        if claim is None:
            refused = cluster.refused.get("ResourceClaim", "").rstrip(".")
            yield refused or f"ResourceClaim {name} does not exist in namespace {pod.namespace}"
        elif claim.metadata.deletion_timestamp:
            yield f"ResourceClaim {name} is being deleted"
        elif template and pod.uid not in [one.uid for one in claim.metadata.owner_references]:
            yield f"ResourceClaim {name} was made for another Pod"
        elif _taken(claim, pod):
            yield f"ResourceClaim {name} is in use by {_MOST_CONSUMERS} Pods, the most"
        else:
            yield from _no_class(claim, cluster)


def _taken(claim: ResourceClaim, pod: Pod) -> bool:
    users = [one.uid for one in claim.status.reserved_for]
    return bool(claim.status.allocation) and len(users) >= _MOST_CONSUMERS and pod.uid not in users


def _no_class(claim: ResourceClaim, cluster: Cluster) -> Iterator[str]:
    known = {one.name for one in cluster.classes}
    if claim.status.allocation or "DeviceClass" in cluster.refused:
        return
    for request in claim.spec.devices.requests:
        for one in request.get("firstAvailable") or [request.get("exactly") or {}]:
            name = one.get("deviceClassName", "")
            if name not in known:
                near = closest(name, known)
                hint = f"; is {near} meant?" if near else ""
                yield f"DeviceClass {name} of ResourceClaim {claim.name} does not exist{hint}"


def _full_quotas(namespace: str, cluster: Cluster) -> Iterator[str]:
    """Quotas that keep claims from being made."""
    for quota in cluster.quotas:
        if quota.namespace != namespace:
            continue
        for name, hard in quota.spec.hard.items():
            used = quota.status.used.get(name, "0")
            about = "resourceclaims" in name or "deviceclass" in name
            if about and quantity(used) >= quantity(hard):
                yield f"ResourceQuota {quota.name} allows {hard} of {name}, all in use"


def _unbound(pod: Pod, cluster: Cluster) -> Iterator[str]:
    wanted = [*volume_claims(pod)]
    if not wanted or "PersistentVolumeClaim" in cluster.refused:
        return
    scheduling = Scheduling(cluster)
    there = {one.name: one for one in scheduling.volume_claims(pod)}
    for name in wanted:
        claim = there.get(name)
        if claim is None:
            yield f"PersistentVolumeClaim {name} does not exist in namespace {pod.namespace}"
        elif not claim.spec.volume_name and not scheduling.waits_for_pod(claim):
            yield f"PersistentVolumeClaim {name} is not bound to a volume"


def _sentence(
    pod: Pod, nodes: Sequence[NodeVerdict], schedulable: bool | None, cluster: Cluster
) -> str:
    fits = [each.node for each in nodes if each.fits]
    if schedulable:
        said = condition(pod.status.conditions, "PodScheduled")
        last = f"; the scheduler last said: {one_line(said.message)}" if said else ""
        return f"Pod {pod.key} could be scheduled now, on {listed(fits, _NAMED)}{last}."
    if schedulable is None and not any(each.fits is False for each in nodes):
        return f"Pod {pod.key} waits, and what decides cannot be judged here."
    ruled_out = [each for each in nodes if each.fits is False]
    if schedulable is None:
        open_ = [each.node for each in nodes if each.fits is not False]
        on = listed(open_, _NAMED)
        return f"Pod {pod.key} may be scheduled on {on}: not all can be judged here."
    near = max(ruled_out, key=lambda each: each.worst.kind)
    kind = near.worst.kind
    alike = [each for each in ruled_out if each.worst.kind is kind]
    phrase = _phrase(kind, alike)
    if kind is Kind.NOT_OFFERED:
        phrase += _offered_instead(pod, cluster)
    many = f"on {len(alike)} of {len(nodes)} Nodes" if len(nodes) > 1 else f"on Node {near.node}"
    return f"Pod {pod.key} waits: {phrase} ({many})."


def _phrase(kind: Kind, alike: Sequence[NodeVerdict]) -> str:
    worst = [each.worst for each in alike]
    free, wanted = sum((one.free for one in worst), Fraction()), max(one.wanted for one in worst)
    if kind in (Kind.IN_USE, Kind.RESOURCES) and wanted and free >= wanted:
        return f"enough is free, but no Node has {number(wanted)} together: it is fragmented"
    return _PHRASES[kind]


def _offered_instead(pod: Pod, cluster: Cluster) -> str:
    wanted = [name for name in requests(pod) if extended(name)]
    known = {name for node in cluster.nodes for name in node.status.allocatable if extended(name)}
    known |= {one.spec.extended_resource_name or "" for one in cluster.classes} - {""}
    for name in wanted:
        if name not in known:
            near = closest(name, known)
            offered = listed(sorted(known), _NAMED)
            others = f"; is {near} meant?" if near else f"; Nodes offer {offered}"
            return f": {name}" + (others if known else "")
    return ""


def _kind(reason: Reason) -> Kind:
    return reason.kind


def _placed(pod: Pod, cluster: Cluster) -> Verdict:
    """Why a Pod that has a Node has these devices."""
    node = pod.spec.node_name
    devices = Devices(cluster)
    details = [line for name in pod.claims for line in _given(pod, name, cluster, devices)]
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    for container in statuses:
        for resource in container.allocated_resources_status:
            if not resource.name.startswith("claim:"):
                ids = ", ".join(f"{one.resource_id} ({one.health})" for one in resource.resources)
                how = "chosen by the kubelet, by what the device plugin prefers"
                details.append(
                    one_line(f"container {container.name}: {resource.name} {ids}, {how}")
                )
    if not details and asks_for(pod):
        details.append(f"It asks for {', '.join(asks_for(pod))}, chosen by the kubelet.")
    if not asks_for(pod):
        details.append("It asks for no NPU and no other device.")
    state = "runs" if pod.status.phase == "Running" else "has been scheduled"
    return Verdict(f"Pod {pod.key} {state} on Node {node}.", details=tuple(details))


def _given(pod: Pod, name: str, cluster: Cluster, devices: Devices) -> Iterator[str]:
    for claim in cluster.claims:
        if (claim.namespace, claim.name) != (pod.namespace, name):
            continue
        requests_ = {one["name"]: one for one in claim.spec.devices.requests}
        for result in claim.results:
            request = requests_.get(result.request.split("/")[0], {})
            yield (
                f"claim {name}, request {result.request}: {result.device}, the first that was free"
                + (_selected_by(request, result.request, devices))
            )


def _selected_by(request: Plain, named: str, devices: Devices) -> str:
    try:
        asked = next(one for one in devices.asked(request) if one.name == named)
    except (KeyError, StopIteration, GivesUpError, CannotJudgeError):
        return ""
    texts = [f"{one_line(expression, 120)} ({whose})" for whose, expression in asked.selectors]
    return f" of those that meet {' and '.join(texts)}" if texts else ""
