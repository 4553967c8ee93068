"""What is known of a Pod that is Pending: the scheduler's own words, then facts. Pure.

Each fact is true of the objects by itself. None is a verdict: only the scheduler knows whether a
Node fits.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from npu_agent.kube.objects import ApiTaint, Node, Plain, PodClaim, ResourceClaim
from npu_agent.people.cluster import cel, rows
from npu_agent.people.cluster.fetch import AgentReports
from npu_agent.people.cluster.objects import (
    Cluster,
    DeviceClass,
    Pod,
    condition,
    expressions,
)
from npu_agent.people.cluster.rows import Words
from npu_agent.text import closest, listed, natural, one_line

_IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""Before a DeviceClass's name: the resource by which a Pod requests its devices."""
_CORDONED = "node.kubernetes.io/unschedulable"
_PART = re.compile("[a-z]+-[0-9]+core[.][0-9]+gb")
"""The vendor's names for a part of a card: ``anvil-4core.24gb``."""
_CUT = "an administrator offers parts of cards by `coresPerDevice`, or with DRA by `dra.partitions`"
_NAMED = 3
"""Nodes, Pods or names that a fact lists; more are counted."""
_SELECTOR = 160
"""Characters of a selector that are shown."""
_LINE = 1000
"""Characters of a line."""
_MANY = 20
"""Lines: those of more Nodes are counted."""
_SECONDS = 5.0
"""For the selectors of an answer, together: they are other people's."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about a resource, a claim or a Node."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a Pod."""

    sentence: str
    scheduler: str | None = None
    """The message of its condition PodScheduled; None: no scheduler has reported on it."""
    facts: tuple[Fact, ...] = ()


def why(
    pod: Pod, own: Cluster, cluster: Cluster, words: Words, reports: AgentReports | None = None
) -> Explanation:
    """Returns what the scheduler and the objects say of a Pod.

    Args:
        pod: the Pod.
        own: the claims and templates of its namespace.
        cluster: the objects of all namespaces, as far as the user may read them.
        words: the vendor's names.
        reports: of the agent on the Node of a Pod that has one.
    """
    phase = pod.status.phase
    if phase in ("Succeeded", "Failed"):
        return Explanation(f"Pod {pod.key} has ended: its phase is {phase}.")
    if pod.metadata.deletion_timestamp:
        return Explanation(f"Pod {pod.key} is being deleted.")
    if pod.spec.node_name:
        sentence = f"Pod {pod.key} is on Node {pod.spec.node_name}: its phase is {phase}."
        return Explanation(sentence, facts=tuple(_devices(pod, own, cluster, words, reports)))
    said = condition(pod.status.conditions, "PodScheduled")
    sentence = f"Pod {pod.key} is {phase}."
    if said is None:
        name = pod.spec.scheduler_name
        sentence = f"Pod {pod.key} is {phase}; no scheduler has reported on it ({name})."
    facts = (*_requests(pod, own, cluster, words), *_nodes(pod, cluster, words))
    message = said.message or said.reason if said else None
    return Explanation(sentence, message, tuple(dict.fromkeys(facts)))


def _requests(pod: Pod, own: Cluster, cluster: Cluster, words: Words) -> Iterator[Fact]:
    if gates := pod.spec.scheduling_gates:
        names = listed((gate.name for gate in gates), _NAMED)
        yield Fact(
            "scheduling gates", f"{names}: no scheduler places the Pod until they are removed"
        )
    resources = {name: n for name, n in rows.requests(pod).items() if _extended(name)}
    asks = [f"{n} {name}" for name, n in resources.items()]
    asks += [f"claim {claim.name}" for claim in pod.spec.resource_claims]
    yield Fact("requests", ", ".join(asks) or "no NPU and no other device")
    published = _Published(cluster, words)
    for name in resources:
        yield from _resource(name, cluster, published, words)
    for wanted in pod.spec.resource_claims:
        yield from _claim(pod, wanted, own, cluster, published)
    for rule in cluster.taint_rules if pod.spec.resource_claims else ():
        if (by := rule.spec.device_selector) is not None:
            devices = ", ".join(
                f"{key} {by[key]}" for key in ("device", "pool", "driver") if key in by
            )
            taint = _taint(rule.spec.taint)
            yield Fact(f"DeviceTaintRule {rule.name}", f"{taint} on {devices or 'every device'}")


def _extended(resource: str) -> bool:
    """Whether this names devices, by either API."""
    domain, slash, _ = resource.partition("/")
    own = f".{domain}".endswith(".kubernetes.io")
    return resource.startswith(_IMPLICIT) or bool(slash and not own)


def _resource(name: str, cluster: Cluster, published: _Published, words: Words) -> Iterator[Fact]:
    """Yields the Nodes that offer an extended resource, and the DeviceClasses that serve it."""
    implicit = name.removeprefix(_IMPLICIT)
    classes = [
        class_
        for class_ in cluster.classes
        if name in (class_.spec.extended_resource_name, _IMPLICIT + class_.name)
    ]
    for class_ in classes:
        of = f"DeviceClass {class_.name}"
        devices = published.selected([(of, selector) for selector in _selectors(class_)])
        yield Fact(name, f"{of} serves it by DRA: {devices}")
    if "Node" in cluster.refused:
        return
    used: Counter[str] = Counter()
    for pod in cluster.pods:
        used[pod.spec.node_name] += rows.requests(pod).get(name, 0)
    offers = {
        node.name: (rows.number(node.status.allocatable.get(name, "0")), count)
        for node in cluster.nodes
        if (count := rows.number(node.status.capacity.get(name, "0")))
    }
    most = sorted(offers, key=lambda node: (used[node] - offers[node][0], natural(node)))
    if offers:
        nodes = (
            f"{node} ({offers[node][0]} of {offers[node][1]} allocatable"
            + (")" if "Pod" in cluster.refused else f", Pods have {used[node]})")
            for node in most
        )
        yield Fact(name, f"Nodes offer it: {listed(nodes, _NAMED)}")
    elif not classes and implicit != name:
        yield Fact(name, _missing("DeviceClass", implicit, (c.name for c in cluster.classes)))
    elif not classes and words.is_resource(name) and _PART.fullmatch(name.partition("/")[2]):
        yield Fact(name, f"no Node offers it: {_CUT}")
    elif not classes:
        names = {name for node in cluster.nodes for name in node.status.capacity if _extended(name)}
        names |= {class_.spec.extended_resource_name or "" for class_ in cluster.classes} - {""}
        yield Fact(name, f"no Node offers it{_meant(name, names)}")


def _missing(kind: str, name: str, existing: Iterable[str]) -> str:
    return f"{kind} {name} does not exist{_meant(name, existing)}"


def _meant(name: str, names: Iterable[str]) -> str:
    """What a person may have meant by a name that does not exist."""
    names = sorted(names, key=natural)
    if near := closest(name, names):
        return f"; did you mean {near}?"
    return f"; there are {listed(names, _NAMED)}" if names else ""


def _claim(
    pod: Pod, wanted: PodClaim, own: Cluster, cluster: Cluster, published: _Published
) -> Iterator[Fact]:
    made = {made.name: made.resource_claim_name for made in pod.status.resource_claim_statuses}
    name = wanted.resource_claim_name or made.get(wanted.name)
    template = wanted.resource_claim_template_name
    subject = f"claim {wanted.name}"
    if name is None and template is not None and wanted.name not in made:
        if "ResourceClaimTemplate" not in own.refused:
            templates = [template.name for template in own.templates]
            if template not in templates:
                yield Fact(subject, _missing("ResourceClaimTemplate", template, templates))
            else:
                what = f"no ResourceClaim has been created from template {template} yet"
                yield Fact(subject, f"{what}: see `kubectl describe pod`")
        return
    claim = next((claim for claim in own.claims if claim.name == name), None)
    if claim is None:
        if name is not None and "ResourceClaim" not in own.refused:
            claims = (claim.name for claim in own.claims)
            yield Fact(subject, _missing("ResourceClaim", name, claims))
        return
    yield from _claim_state(subject, claim, pod)
    if not claim.status.allocation:
        for request in claim.spec.devices.requests:
            yield from _request(subject, request, cluster, published)


def _claim_state(subject: str, claim: ResourceClaim, pod: Pod) -> Iterator[Fact]:
    if claim.metadata.deletion_timestamp:
        yield Fact(subject, f"ResourceClaim {claim.name} is being deleted")
    if claim.results:
        devices = (f"{result.device} of pool {result.pool}" for result in claim.results)
        yield Fact(subject, f"ResourceClaim {claim.name} has {listed(devices, _NAMED)}")
    others = [user.name for user in claim.status.reserved_for if user.uid != pod.uid]
    if others:
        yield Fact(subject, f"ResourceClaim {claim.name} is in use by {listed(others, _NAMED)}")


def _request(
    subject: str, request: Plain, cluster: Cluster, published: _Published
) -> Iterator[Fact]:
    """Yields how many devices meet the selectors of a request, or of its alternatives."""
    classes = {class_.name: class_ for class_ in cluster.classes}
    for option in request.get("firstAvailable") or [request.get("exactly") or {}]:
        name = "/".join(filter(None, (request["name"], option.get("name"))))
        class_name = option.get("deviceClassName", "")
        if class_name in classes:
            selectors = [
                (f"DeviceClass {class_name}", selector)
                for selector in _selectors(classes[class_name])
            ]
            selectors += [(f"request {name}", expression) for expression in expressions(option)]
            count = _count(option)
            yield Fact(subject, f"request {name} for {count}: {published.selected(selectors)}")
        elif "DeviceClass" not in cluster.refused:
            missing = _missing("DeviceClass", class_name, classes)
            yield Fact(subject, f"request {name}: {missing}")


def _count(option: Plain) -> str:
    """How many devices a request is for: ``4 devices``."""
    if option.get("allocationMode") == "All":
        return "all devices"
    count = option.get("count", 1)
    return f"{count} device" + ("" if count == 1 else "s")


def _selectors(of: DeviceClass) -> list[str]:
    return expressions({"selectors": of.spec.selectors})


class _Published:
    """The devices of all slices, and the time within which selectors are judged by them."""

    def __init__(self, cluster: Cluster, words: Words) -> None:
        self._devices = rows.devices(cluster)
        self._driver = words.driver
        self._free = None
        if "ResourceClaim" not in cluster.refused:
            free = rows.free_devices(cluster, words)
            self._free = {(device.pool, device.device.name) for device in free}
        self._until = time.monotonic() + _SECONDS

    def selected(self, selectors: Sequence[tuple[str, str]]) -> str:
        """How many meet the selectors, one after the other, on which Nodes, and how many are free.

        Cards and their parts are counted apart: a card of eight cores has up to 14 parts.
        """
        offered = self._devices
        text = f"{_amount(offered)} published"
        for of, expression in selectors if offered else ():
            quoted = f"{one_line(expression, _SELECTOR)} ({of})"
            try:
                with cel.limited_memory():
                    offered, failed = self._matching(expression, offered)
            except cel.CannotJudgeError as error:
                return f"{text}; it cannot be judged here how many meet {quoted}: {error}"
            text += f", of which {_amount(offered)} meet {quoted}"
            if failed:
                name, failure = failed[0]
                text += f"; it fails on {len(failed)}, as on {name}: {failure}"
        if not offered or not selectors:
            return text
        pools: dict[str, list[rows.PublishedDevice]] = defaultdict(list)
        for device in offered:
            pools[device.pool].append(device)
        most = sorted(pools.items(), key=lambda item: -len(item[1]))
        text += f": {listed((f'{pool} has {_amount(of)}' for pool, of in most), _NAMED)}"
        if self._free is None or any(device.driver != self._driver for device in offered):
            return text
        free = [device for device in offered if (device.pool, device.device.name) in self._free]
        return f"{text}; free: {_amount(free)}"

    def _matching(
        self, expression: str, offered: Sequence[rows.PublishedDevice]
    ) -> tuple[list[rows.PublishedDevice], list[tuple[str, cel.CelError]]]:
        """The devices that meet a selector, and the names and errors of those on which it fails."""
        matching = []
        failed = []
        for device in offered:
            if time.monotonic() > self._until:
                raise cel.CannotJudgeError(f"the selectors take more than {_SECONDS:g} s")
            try:
                if cel.matches(expression, device.device, device.driver):
                    matching.append(device)
            except cel.CelError as error:
                failed.append((device.device.name, error))
        return matching, failed


def _amount(devices: Sequence[rows.PublishedDevice]) -> str:
    """``2 cards, 28 parts``, without what there is none of."""
    cards = sum(device.is_card for device in devices)
    parts = sum(device.is_part for device in devices)
    numbers = ((cards, "card"), (parts, "part"), (len(devices) - cards - parts, "other device"))
    texts = [f"{number} {noun}" + ("s" if number > 1 else "") for number, noun in numbers if number]
    return ", ".join(texts) or "none"


def _nodes(pod: Pod, cluster: Cluster, words: Words) -> Iterator[Fact]:
    """Yields a fact about each Node with NPUs, those with most free cores first."""
    if not (pod.spec.resource_claims or any(map(_extended, rows.requests(pod)))):
        return
    nodes = {node.name: node for node in cluster.nodes}
    held: dict[str | None, dict[str, None]] = defaultdict(dict)
    for holding in rows.holdings(cluster, words, AgentReports()):
        held[holding.node][f"{holding.namespace}/{holding.pod}"] = None
    tainted = _tainted(cluster, words)
    npu_nodes = rows.node_rows(cluster, words)
    for row in sorted(npu_nodes, key=lambda row: (-(row.free or 0), natural(row.node))):
        parts = [*_numbers(row), *_node_state(nodes[row.node]), *tainted.get(row.node, ())]
        if held[row.node]:
            parts.append(f"in use by {listed(held[row.node], _NAMED)}")
        if parts:
            yield Fact(row.node, "; ".join(parts))


def _numbers(row: rows.NodeRow) -> Iterator[str]:
    if row.cards is not None:
        yield f"{row.healthy} of {row.cards} cards healthy"
    if row.free is not None:
        widest = f", the widest free device has {row.widest}" if row.widest else ""
        yield f"{row.free} of {row.cores} cores free{widest}"


def _node_state(node: Node) -> Iterator[str]:
    if node.spec.unschedulable:
        yield "cordoned"
    for taint in node.spec.taints:
        if taint.bars and taint.key != _CORDONED:
            yield _taint(taint)
    if cards := node.metadata.annotations.get("npu-agent/cordoned"):
        yield f"cards cordoned: {cards}"
    for ready in node.status.conditions:
        if ready.type.endswith("/NPUReady") and ready.status == "False":
            yield f"{ready.type} is False: {ready.message or ready.reason}"


def _tainted(cluster: Cluster, words: Words) -> Mapping[str, list[str]]:
    """The taints of devices with their cards, by Node."""
    cards: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for device in rows.devices(cluster):
        for taint in device.device.taints if device.driver == words.driver else ():
            if taint.bars:
                cards[device.pool][_taint(taint)][device.card.name] = None
    return {
        pool: [f"{text} on {listed(of, _NAMED)}" for text, of in taints.items()]
        for pool, taints in cards.items()
    }


def _taint(taint: ApiTaint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"taint {taint.key}{value}:{taint.effect}"


def _devices(
    pod: Pod, own: Cluster, cluster: Cluster, words: Words, reports: AgentReports | None
) -> Iterator[Fact]:
    """Yields the devices of a Pod that has a Node."""
    alone = Cluster(pods=(pod,), claims=own.claims, slices=cluster.slices)
    for row in rows.holdings(alone, words, reports or AgentReports()):
        cores = f", cores {row.cores}" if row.cores else ""
        load = "" if row.load is None else f", load {row.load:.0f}%"
        yield Fact(row.of, f"{row.card or 'no device'}{cores}{load}")
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        for resource in container.allocated_resources_status:
            for device in resource.resources:
                if device.health != "Healthy":
                    yield Fact(resource.name, f"{device.resource_id} is {device.health}")


def lines(answer: Explanation, *, each: bool = False) -> str:
    """The sentence, the scheduler's words, and the facts; `each`: of every Node alone."""
    said = [] if answer.scheduler is None else [f"The scheduler: {answer.scheduler}"]
    facts = [f"{fact.subject}: {fact.text}" for fact in answer.facts] if each else _shared(answer)
    texts = [one_line(text, _LINE) for text in (answer.sentence, *said)]
    return "\n".join([*texts, *(f"  {one_line(fact, _LINE)}" for fact in facts)])


def _shared(answer: Explanation) -> Iterator[str]:
    """Yields the facts; subjects of which the same is true share a line."""
    subjects: dict[str, list[str]] = {}
    for fact in answer.facts:
        subjects.setdefault(fact.text, []).append(fact.subject)
    for text, names in [*subjects.items()][:_MANY]:
        yield f"{listed(names, _NAMED)}: {text}"
    if len(subjects) > _MANY:
        yield f"and {len(subjects) - _MANY} lines more: `-o wide` has them"
