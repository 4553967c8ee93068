"""The scheduler's filters other than devices: why a Node does not fit a Pod. Pure.

Selector, affinity, taints, cordon, ports, resources and volumes are judged; affinity between Pods
and spread constraints are not, and said to be unknown.

Source: k8s.io/kubernetes/pkg/scheduler/framework/plugins of Kubernetes 1.37.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Any

from npu_agent.kube.objects import Container, Node, Plain, Pod, Taint
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.quantity import Amounts, amounts, largest, number, quantity, total
from npu_agent.text import listed, natural, one_line

IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""Before a DeviceClass's name: the resource by which a Pod asks for its devices."""
_CORDON = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_NAMED = 3
"""Holders that a reason names."""


class Kind(IntEnum):
    """Reasons that rule a Node out, in the order for people."""

    NOT_OFFERED = 1
    SELECTION = 2
    TAINT = 3
    TOO_BIG = 4
    SELECTOR = 5
    GIVEN_UP = 6
    UNHEALTHY = 7
    DEVICE_TAINT = 8
    CONSTRAINT = 9
    ELSEWHERE = 10
    RESOURCES = 11
    IN_USE = 12
    UNKNOWN = 13
    """It is not known whether this rules it out."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason that rules a Node out."""

    kind: Kind
    text: str
    wanted: Fraction = Fraction()
    free: Fraction = Fraction()
    """Of what there is too little, so that one sees whether all Nodes together have enough."""


def extended(resource: str) -> bool:
    """Whether this names devices, by either API."""
    if resource.startswith(IMPLICIT):
        return True
    domain, slash, _ = resource.partition("/")
    return bool(slash) and not f".{domain}".endswith(".kubernetes.io")


def requests(pod: Pod) -> Amounts:
    """Returns the requests that the scheduler counts for a Pod.

    That of all containers, or of an init container and the sidecars that run by then.
    """
    sidecars: list[Amounts] = []
    peaks: list[Amounts] = []
    for container in pod.spec.init_containers:
        wanted = _wanted(container)
        if container.restart_policy == "Always":
            sidecars.append(wanted)
            peaks.append(total(sidecars))
        else:
            peaks.append(total([*sidecars, wanted]))
    running = total([*sidecars, *map(_wanted, pod.spec.containers)])
    counted = largest([running, *peaks])
    counted |= amounts(pod.spec.resources.requests)
    return total([counted, amounts(pod.spec.overhead)])


def _wanted(container: Container) -> Amounts:
    return amounts({**container.resources.limits, **container.resources.requests})


class Scheduling:
    """The Nodes with what their Pods use."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pods: dict[str, list[Pod]] = defaultdict(list)
        for pod in cluster.pods:
            if pod.spec.node_name and not pod.ended:
                self._pods[pod.spec.node_name].append(pod)
        self._repelling = [
            (pod, term)
            for pods in self._pods.values()
            for pod in pods
            for term in _required(pod.spec.affinity, "podAntiAffinity") or ()
        ]
        self._volumes = {one.name: one for one in cluster.volumes}

    def of(self, node: Node) -> list[Pod]:
        """The Pods that are there and have not ended."""
        return self._pods[node.name]

    def reasons(self, pod: Pod, node: Node, mapped: Iterable[str]) -> Iterator[Reason]:
        """Why the Pod cannot be scheduled there; `mapped` are the names that DRA serves there."""
        yield from _placement(pod, node)
        yield from self._ports(pod, node)
        yield from self._room(pod, node, mapped)
        yield from self._storage(pod, node)
        yield from self._unknown(pod)

    def _ports(self, pod: Pod, node: Node) -> Iterator[Reason]:
        used = [(port, one) for one in self.of(node) for port in _ports(one)]
        for protocol, address, number_ in _ports(pod):
            for (protocol2, address2, number2), other in used:
                same = (protocol, number_) == (protocol2, number2)
                if same and ("0.0.0.0" in (address, address2) or address == address2):  # noqa: S104
                    what = f"its host port {number_} is in use by Pod {other.key}"
                    yield Reason(Kind.RESOURCES, what)

    def _room(self, pod: Pod, node: Node, mapped: Iterable[str]) -> Iterator[Reason]:
        there = amounts(node.status.allocatable)
        of_pods = {one.key: requests(one) for one in self.of(node)}
        wanted = {"pods": Fraction(1), **requests(pod)}
        used = total([*of_pods.values(), {"pods": Fraction(len(of_pods))}])
        for name in sorted(wanted):
            free = there.get(name, Fraction()) - used.get(name, Fraction())
            if name in mapped or not wanted[name] or wanted[name] <= free:
                continue
            if extended(name):
                holders = {key: one[name] for key, one in of_pods.items() if one.get(name)}
                yield _too_few(name, wanted[name], node, holders)
                continue
            text = f"wants {number(wanted[name])} {name}, {number(max(free, Fraction()))} are free"
            big = wanted[name] > there.get(name, 0)
            kind = Kind.TOO_BIG if big else Kind.RESOURCES
            yield Reason(kind, text, wanted[name], max(free, Fraction()))

    def _storage(self, pod: Pod, node: Node) -> Iterator[Reason]:
        for claim in self.volume_claims(pod):
            if claim.spec.volume_name:
                volume = self._volumes.get(claim.spec.volume_name)
                if volume is None:
                    yield Reason(Kind.UNKNOWN, f"its PersistentVolume {claim.spec.volume_name}")
                elif (
                    required := (volume.spec.node_affinity or {}).get("required")
                ) and not matches_selector(node, required):
                    what = f"PersistentVolume {volume.name} cannot be used there"
                    yield Reason(Kind.ELSEWHERE, what)
            elif self.waits_for_pod(claim):
                text = f"whether PersistentVolumeClaim {claim.name} can have a volume there"
                yield Reason(Kind.UNKNOWN, text)

    def volume_claims(self, pod: Pod) -> list[Any]:
        """The Pod's PersistentVolumeClaims that there are."""
        names = set(volume_claims(pod))
        return [
            one
            for one in self._cluster.volume_claims
            if one.namespace == pod.namespace and one.name in names
        ]

    def waits_for_pod(self, claim: Any) -> bool:
        """Whether a volume is made when the Pod's Node is chosen."""
        named = claim.spec.storage_class_name
        classes = {one.name: one for one in self._cluster.storage_classes}
        return named in classes and classes[named].volume_binding_mode == "WaitForFirstConsumer"

    def _unknown(self, pod: Pod) -> Iterator[Reason]:
        for field in ("podAffinity", "podAntiAffinity"):
            if _required(pod.spec.affinity, field):
                yield Reason(Kind.UNKNOWN, f"its {field}")
        hard = ("DoNotSchedule", None)
        if any(
            one.get("whenUnsatisfiable") in hard for one in pod.spec.topology_spread_constraints
        ):
            yield Reason(Kind.UNKNOWN, "its topologySpreadConstraints")
        for other, term in self._repelling:
            if _repels(other, term, pod):
                yield Reason(Kind.UNKNOWN, f"the podAntiAffinity of Pod {other.key}")
                return


def volume_claims(pod: Pod) -> Iterator[str]:
    """The names of its PersistentVolumeClaims."""
    for volume in pod.spec.volumes:
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]
        elif "ephemeral" in volume:
            yield f"{pod.name}-{volume['name']}"


def _placement(pod: Pod, node: Node) -> Iterator[Reason]:
    """Cordon, taints, node selector and affinity."""
    taints = [*node.spec.taints]
    if node.spec.unschedulable and _CORDON.key not in [one.key for one in taints]:
        taints.append(_CORDON)
    for taint in taints:
        if taint.bars and not any(tolerates(one, taint) for one in pod.spec.tolerations):
            text = f"has the taint {taint.key}{'=' * bool(taint.value)}{taint.value}:{taint.effect}"
            yield Reason(Kind.TAINT, "is cordoned" if taint.key == _CORDON.key else one_line(text))
    for key, value in pod.spec.node_selector.items():
        if node.metadata.labels.get(key) != value:
            has = node.metadata.labels.get(key)
            text = f"lacks the label {key}={value}" + (f" (it is {has})" if has else "")
            yield Reason(Kind.SELECTION, one_line(text))
    required = _required(pod.spec.affinity, "nodeAffinity")
    if required and not matches_selector(node, required):
        yield Reason(Kind.SELECTION, "does not meet the Pod's node affinity")


def _too_few(name: str, wanted: Fraction, node: Node, holders: Mapping[str, Fraction]) -> Reason:
    """Why there are too few of an extended resource."""
    there = {
        field: _amount(getattr(node.status, field), name) for field in ("allocatable", "capacity")
    }
    healthy, cards = there["allocatable"], max(there.values())
    free = max(healthy - sum(holders.values()), Fraction())
    if name not in node.status.allocatable and not cards:
        return Reason(Kind.NOT_OFFERED, f"offers no {name}")
    parts = [f"wants {number(wanted)} of {name}, {number(free)} of {number(cards)} are free"]
    if holders:
        has = {f"{key} has {number(amount)}": amount for key, amount in holders.items()}
        parts.append(most(has))
    if cards > healthy:
        parts.append(f"{number(cards - healthy)} are unhealthy or cordoned")
    kind = Kind.IN_USE
    if wanted > cards:
        kind = Kind.TOO_BIG
    elif wanted > healthy:
        kind = Kind.UNHEALTHY
    return Reason(kind, "; ".join(parts), wanted, free)


def most(of: Mapping[str, float | Fraction]) -> str:
    """The holders of most, by their names; more are counted."""
    return listed(sorted(of, key=lambda name: (-of[name], natural(name))), _NAMED)


def _amount(of: Mapping[str, str], name: str) -> Fraction:
    return quantity(of.get(name, "0"))


def tolerates(toleration: Plain, taint: Taint) -> bool:
    """Returns whether a taint of a Node or device is tolerated, `tolerationSeconds` aside."""
    if (toleration.get("effect") or taint.effect) != taint.effect:
        return False
    if (toleration.get("key") or taint.key) != taint.key:
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Equal":
        return (toleration.get("value") or "") == taint.value
    return operator == "Exists"


def matches_selector(node: Node, selector: Plain) -> bool:
    """Whether a Node meets a NodeSelector: one of its terms; an empty term has no Nodes."""
    fields = {"metadata.name": node.name}
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and _all(term.get("matchExpressions"), node.metadata.labels)
        and _all(term.get("matchFields"), fields)
        for term in selector.get("nodeSelectorTerms") or ()
    )


def _all(expressions: Iterable[Plain] | None, labels: Mapping[str, str]) -> bool:
    return all(
        _meets(labels.get(one["key"]), one["operator"], one.get("values") or ())
        for one in expressions or ()
    )


def _meets(value: str | None, operator: str, values: Sequence[str | None]) -> bool:
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    try:
        label, (limit,) = int(value or ""), [int(one or "") for one in values]
    except ValueError:
        return False
    return label > limit if operator == "Gt" else label < limit


def _required(affinity: Plain | None, field: str) -> Any:
    found = ((affinity or {}).get(field) or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return found or None


def _repels(other: Pod, term: Plain, pod: Pod) -> bool:
    """Whether the term of another Pod's anti-affinity may mean this Pod."""
    somewhere = term.get("namespaceSelector") is not None
    if not somewhere and pod.namespace not in (term.get("namespaces") or [other.namespace]):
        return False
    selector = term.get("labelSelector")
    if selector is None:
        return False
    labels = pod.metadata.labels
    wanted = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and _all(selector.get("matchExpressions"), labels)


def _ports(pod: Pod) -> Iterator[tuple[str, str, int]]:
    sidecars = (one for one in pod.spec.init_containers if one.restart_policy == "Always")
    for container in (*pod.spec.containers, *sidecars):
        for port in container.ports:
            if host := port.get("hostPort"):
                address = port.get("hostIP") or "0.0.0.0"  # noqa: S104 (what Kubernetes writes)
                yield port.get("protocol") or "TCP", address, host
