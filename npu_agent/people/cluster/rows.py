"""Rows about Nodes, holders and use, of the objects and the agents' reports. Pure.

What is not known is None. Capacities of partitions that overlap do not add up: all sums are of
cores.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from npu_agent.core.hardware import CoreRange
from npu_agent.kube.objects import Node, SliceDevice
from npu_agent.people.cluster.fetch import AgentReports, agents
from npu_agent.people.cluster.objects import Cluster, Container, Pod, condition, quantity
from npu_agent.people.report import Report

_CORE = re.compile(r"core-([0-9]{1,3})", re.ASCII)
"""The counter of a core."""
_MOST_CORES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The vendor's names."""

    driver: str
    """By DRA."""
    domain: str
    """The end of the domains of resources and labels: ``example.com``."""
    cores: Mapping[str, int]
    """Of a card, by what labels call its family."""

    def is_resource(self, name: str) -> bool:
        domain = name.partition("/")[0]
        return domain == self.domain or domain.endswith(f".{self.domain}")

    def may_be_resource(self, name: str) -> bool:
        """Whether only the agent's report says what this extended resource is.

        A config can give a resource a name of any domain.
        """
        domain, slash, _ = name.partition("/")
        is_kubernetes = f".{domain}".endswith(".kubernetes.io")
        return bool(slash) and not is_kubernetes and not self.is_resource(name)

    def others_of(self, report: Report | None) -> frozenset[str]:
        """The resources of an agent that have names of other domains."""
        return frozenset(filter(self.may_be_resource, report.resource_names if report else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A Node; `cards` and `healthy` are cards, the next four numbers cores."""

    node: str
    cards: int | None
    healthy: int | None
    cores: int | None
    allocated: int | None
    free: int | None
    widest: int | None
    """The cores of the widest device that is still free."""
    driver: str | None
    agent: str | None
    api: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A Pod's part of a card; of a Pod that waits, `card` is None."""

    namespace: str
    pod: str
    node: str | None
    card: str | None = None
    cores: str | None = None
    """``0-3``; None where only the agent knows."""
    load: float | None = None
    """Per cent, the mean of its cores."""
    since: str | None
    status: str
    of: str
    """The claim, or the resource."""
    family: str = ""
    """Of the card; "": not known."""


class CardKey(NamedTuple):
    """A card of a Node: families number theirs alike."""

    family: str
    name: str


@dataclass(frozen=True)
class PublishedDevice:
    """A device of a slice, and what of a card it is; a Node's pool has its name."""

    driver: str
    pool: str
    device: SliceDevice

    @cached_property
    def card(self) -> CardKey:
        number = self.device.attribute("index")
        name = f"npu{number}" if isinstance(number, int) else self.device.name
        return CardKey(str(self.device.attribute("arch") or ""), name)

    @cached_property
    def cores(self) -> frozenset[int]:
        counters = [name for set_ in self.device.consumes_counters for name in set_.counters]
        cores = {int(core[1]) for name in counters if (core := _CORE.fullmatch(name))}
        count = self.device.attribute("cores")
        # A slice may be another's than the agent's, and say anything.
        usable = isinstance(count, int) and 0 < count <= _MOST_CORES
        return frozenset(cores or range(count if usable else 1))

    @property
    def is_card(self) -> bool:
        """Whether it is a whole card, of a driver that says so."""
        return bool(self.device.attribute("type") == "card")

    @property
    def is_part(self) -> bool:
        return bool(self.device.attribute("type") == "cores")

    @property
    def barred(self) -> bool:
        return any(taint.bars for taint in self.device.taints)

    @property
    def unhealthy(self) -> bool:
        return any(taint.key.endswith("/unhealthy") for taint in self.device.taints)


@dataclass(slots=True)
class _Sums:
    cards: int = 0
    healthy: int = 0
    cores: int = 0
    allocated: int = 0
    free: int = 0
    widest: int = 0
    """-1: not known."""
    driver: str | None = None
    apis: list[str] = field(default_factory=list)


def devices(cluster: Cluster) -> list[PublishedDevice]:
    """The devices of the newest slices of each pool, of any driver."""
    newest: dict[tuple[str, str], int] = defaultdict(int)
    for spec in (slice_.spec for slice_ in cluster.slices):
        pool = spec.driver, spec.pool.name
        newest[pool] = max(newest[pool], spec.pool.generation)
    return [
        PublishedDevice(spec.driver, spec.pool.name, device)
        for spec in (slice_.spec for slice_ in cluster.slices)
        if spec.pool.generation == newest[spec.driver, spec.pool.name]
        for device in spec.devices
    ]


def free_devices(cluster: Cluster, words: Words) -> list[PublishedDevice]:
    """The vendor's devices that no claim has, and no taint bars, of all pools."""
    held = _held(cluster, words)
    pools: dict[str, list[PublishedDevice]] = defaultdict(list)
    for device in devices(cluster):
        if device.driver == words.driver:
            pools[device.pool].append(device)
    return [device for name, pool in pools.items() for device in _open(pool, held[name])]


def node_rows(cluster: Cluster, words: Words, reports: AgentReports | None = None) -> list[NodeRow]:
    """The Nodes that have cards, or the agent; who holds what must have been read.

    The report of a Node's agent counts its cards where the objects do not tell: see `to_ask`.
    """
    running = agents(cluster)
    pools: dict[str, list[PublishedDevice]] = defaultdict(list)
    for device in devices(cluster):
        if device.driver == words.driver:
            pools[device.pool].append(device)
    held = _held(cluster, words)
    asked = _asked(cluster, words)
    readable = not {"Pod", "ResourceClaim"} & cluster.refused.keys()
    rows = []
    for node in cluster.nodes:
        sums = _Sums()
        _add_slices(sums, pools[node.name], held[node.name])
        complete = _add_resources(sums, node, asked[node.name], words)
        report = reports.found.get(node.name) if reports else None
        if report and (not complete or words.others_of(report)):
            sums = _from_report(report, sums)
            complete = True
        elif not report and not sums.apis and node.name in running:
            complete = not any(map(words.may_be_resource, node.status.capacity))
        if sums.apis or node.name in running:
            pods = running[node.name]
            hide = not readable or not complete
            rows.append(
                NodeRow(
                    node=node.name,
                    cards=sums.cards if complete else None,
                    healthy=sums.healthy if complete else None,
                    cores=sums.cores if complete else None,
                    allocated=None if hide else sums.allocated,
                    free=None if hide else sums.free,
                    widest=None if hide or sums.widest < 0 else sums.widest,
                    driver=sums.driver or _label(node, "driver.version", words),
                    agent=_version(pods[0]) if pods else None,
                    api=",".join(sums.apis) or "none",
                )
            )
    return rows


def free_resource(
    cluster: Cluster, node: Node, words: Words, report: Report | None = None
) -> str | None:
    """The resource by which a Pod gets a free device of this Node, whose agent's `report` this is.

    Of the device plugin's it is the one with the fewest devices, which are the widest; "": a claim
    gets a whole card; None: no device is free.
    """
    asked: Counter[str] = Counter()
    others = words.others_of(report)
    for pod in cluster.pods:
        if pod.spec.node_name == node.name:
            asked.update(_plugin_requests(pod, words, others))
    free = [
        (number(text), name)
        for name, text in node.status.allocatable.items()
        if (words.is_resource(name) or name in others) and number(text) > asked[name]
    ]
    if free:
        return min(free)[1]
    pool = [part for part in devices(cluster) if part.pool == node.name]
    own = [part for part in pool if part.driver == words.driver]
    open_ = _open(own, _held(cluster, words)[node.name])
    return "" if any(part.is_card for part in open_) else None


def to_ask(cluster: Cluster, words: Words) -> set[str]:
    """The Nodes whose agent has to be asked which resources are its cards."""
    named = [(node.name, name) for node in cluster.nodes for name in node.status.capacity]
    named += [
        (pod.spec.node_name, name)
        for pod in cluster.pods
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        for name in container.resources.limits  # an extended resource is always among these
    ]
    others = set(filter(words.may_be_resource, {name for _, name in named}))
    return {node for node, name in named if name in others}


def holdings(cluster: Cluster, words: Words, reports: AgentReports) -> list[Holding]:
    """The Pods that hold cards, by both APIs, and those that wait for one."""
    published = {
        (device.driver, device.pool, device.device.name): device for device in devices(cluster)
    }
    claims = {claim.key: claim for claim in cluster.claims}
    rows: list[Holding] = []
    for pod in cluster.pods:
        report = reports.found.get(pod.spec.node_name)
        given = [
            (name, result)
            for name in pod.claims
            if (claim := claims.get(f"{pod.namespace}/{name}"))
            and any(user.uid == pod.uid for user in claim.status.reserved_for)
            for result in claim.results
            if result.driver == words.driver and not result.admin_access
        ]
        for name, result in given:
            device = published.get((result.driver, result.pool, result.device))
            if device is None:
                rows.append(_holding(pod, f"claim/{name}", card=result.device))
                continue
            cores = CoreRange(min(device.cores), max(device.cores))
            rows.append(
                _holding(
                    pod,
                    f"claim/{name}",
                    card=device.card.name,
                    cores=str(cores),
                    load=_load(report, device.card, device.cores),
                    family=device.card.family,
                )
            )
        every = [report] if report else [] if pod.spec.node_name else [*reports.found.values()]
        others = frozenset[str]().union(*map(words.others_of, every))
        rows += _by_plugin(pod, words, report, others)
    return rows


def by_idleness(rows: list[Holding]) -> list[Holding]:
    """Sorts holders: idle first, of these the longest there; unknown last."""
    held = [row for row in rows if row.card is not None]
    return sorted(held, key=lambda row: (row.load is None, row.load or 0.0, row.since or ""))


def _held(cluster: Cluster, words: Words) -> dict[str, set[str]]:
    """The allocated devices by pool."""
    by_pool: dict[str, set[str]] = defaultdict(set)
    for claim in cluster.claims:
        for result in claim.results:
            if result.driver == words.driver and not result.admin_access:
                by_pool[result.pool].add(result.device)
    return by_pool


def _asked(cluster: Cluster, words: Words) -> Counter[str]:
    """How many devices of the device plugin Pods have, by Node."""
    by_node: Counter[str] = Counter()
    for pod in cluster.pods:
        by_node[pod.spec.node_name] += sum(_plugin_requests(pod, words).values())
    return by_node


def requests(pod: Pod) -> Mapping[str, int]:
    """The devices that the scheduler counts for a Pod, by resource.

    Those of its containers and sidecars, or of an init container and the sidecars before it.
    """
    sidecars: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for container in pod.spec.init_containers:
        if container.restart_policy == "Always":
            sidecars += _counted(container)
            most |= sidecars
        else:
            most |= sidecars + _counted(container)
    return most | sum(map(_counted, pod.spec.containers), sidecars)


def _counted(container: Container) -> Counter[str]:
    wanted = {**container.resources.limits, **container.resources.requests}
    return Counter({name: number(text) for name, text in wanted.items() if "/" in name})


def number(text: str) -> int:
    """A number of devices, which Kubernetes may write as ``1k``."""
    try:
        return int(quantity(text))
    except ValueError:
        return 0


def _plugin_requests(pod: Pod, words: Words, others: Collection[str] = ()) -> dict[str, int]:
    """The devices that a Pod has of each device plugin resource, without those of a claim.

    `others` are resources of other domains that are cards, too.
    """
    extended = pod.status.extended_resource_claim_status
    mappings = extended.request_mappings if extended else ()
    claimed = {mapping.get("resourceName") for mapping in mappings}
    return {
        name: count
        for name, count in requests(pod).items()
        if (words.is_resource(name) or name in others) and name not in claimed
    }


def _add_slices(sums: _Sums, pool: list[PublishedDevice], held: set[str]) -> None:
    if not pool:
        return
    cards: dict[CardKey, set[int]] = defaultdict(set)
    used = _used(pool, held)
    barred = {part.card for part in pool if part.barred}
    unhealthy = {part.card for part in pool if part.unhealthy}
    for part in pool:
        cards[part.card] |= part.cores
    sums.cards += len(cards)
    sums.healthy += len(cards.keys() - unhealthy)
    sums.cores += sum(map(len, cards.values()))
    sums.allocated += sum(map(len, used.values()))
    sums.free += sum(len(cards[card] - used[card]) for card in cards.keys() - barred)
    sums.widest = max([sums.widest, *(len(part.cores) for part in _open(pool, held))])
    sums.driver = next((str(v) for p in pool if (v := p.device.attribute("driverVersion"))), None)
    sums.apis.append("dra")


def _used(pool: list[PublishedDevice], held: set[str]) -> dict[CardKey, set[int]]:
    """The cores of each card that claims have."""
    used: dict[CardKey, set[int]] = defaultdict(set)
    for part in pool:
        if part.device.name in held:
            used[part.card] |= part.cores
    return used


def _open(pool: list[PublishedDevice], held: set[str]) -> list[PublishedDevice]:
    """The devices that a claim may still get."""
    used = _used(pool, held)
    barred = {part.card for part in pool if part.barred}
    return [part for part in pool if part.card not in barred and not part.cores & used[part.card]]


def _add_resources(sums: _Sums, node: Node, used: int, words: Words) -> bool:
    """The device plugin's devices; returns whether their cores are known, by the Node's labels."""
    devices = _devices(node.status.capacity, words)
    if not devices:
        return True
    sums.apis.append("device-plugin")
    count = _label(node, "npu.count", words)
    family = _label(node, "npu.family", words)
    width = words.cores.get(family or "")
    if width is None or not (count or "").isdecimal():
        return False
    cards = int(count or 0) - sums.cards  # those that DRA does not have
    cards_each = cards * width // devices
    usable = _devices(node.status.allocatable, words)
    sums.cards += cards
    sums.healthy += cards * usable // devices
    sums.cores += cards * width
    sums.allocated += used * cards_each
    free = max(0, usable - used)
    sums.free += free * cards_each
    sums.widest = max(sums.widest, cards_each if free else 0)
    return True


def _from_report(report: Report, others: _Sums) -> _Sums:
    """All cards of a Node, as its agent has them; how they are cut is not in the report."""
    sums = _Sums(widest=-1, driver=others.driver, apis=others.apis)
    if report.resources and "device-plugin" not in sums.apis:
        sums.apis.append("device-plugin")
    for card in report.cards:
        every = frozenset(range(card.core_count))
        used = frozenset[int]().union(*(_cores(holder.cores) or every for holder in card.holders))
        healthy = card.health.state != "unhealthy"
        sums.cards += 1
        sums.healthy += healthy
        sums.cores += len(every)
        sums.allocated += len(used)
        sums.free += len(every - used) if healthy and card.cordoned is None else 0
    return sums


def _devices(quantities: Mapping[str, str], words: Words) -> int:
    """The devices of all the vendor's resources."""
    return sum(number(text) for name, text in quantities.items() if words.is_resource(name))


def _label(node: Node, name: str, words: Words) -> str | None:
    labels = sorted(node.metadata.labels.items(), reverse=True)
    return next(
        (
            value
            for key, value in labels
            if key.partition("/")[2] == name and words.is_resource(key)
        ),
        None,
    )


def _version(pod: Pod) -> str:
    """The tag of the agent's image; whether it is ready."""
    _, _, tag = pod.agent_image.partition("@")[0].rpartition("/")[2].partition(":")
    ready = condition(pod.status.conditions, "Ready")
    return (tag or "latest") + ("" if ready and ready.status == "True" else " (not ready)")


def _by_plugin(
    pod: Pod, words: Words, report: Report | None, others: Collection[str]
) -> Iterator[Holding]:
    wanted = _plugin_requests(pod, words, others)
    if not pod.spec.node_name:
        if wanted or (pod.spec.resource_claims and not pod.claims):
            yield _holding(pod, ",".join(wanted) or "claim")
        return
    reported = [
        (card, holder)
        for card in (report.cards if report and wanted else ())
        for holder in card.holders
        if (holder.namespace, holder.pod) == (pod.namespace, pod.name) and not holder.claim
    ]
    for card, holder in reported:
        yield _holding(
            pod,
            holder.resource,
            card=card.name,
            cores=holder.cores or f"0-{card.core_count - 1}",
            load=_load(report, CardKey(card.family, card.name), _cores(holder.cores)),
            family=card.family,
        )
    if reported:
        return
    by_kubelet = [  # KEP-4680: Kubernetes 1.36 and later
        (of.name, device.resource_id)
        for status in (*pod.status.container_statuses, *pod.status.init_container_statuses)
        for of in status.allocated_resources_status
        if of.name in wanted
        for device in of.resources
    ]
    for name, card_id in by_kubelet or [(name, f"? ({n})") for name, n in wanted.items()]:
        yield _holding(pod, name, card=card_id)


def _holding(pod: Pod, of: str, **card: Any) -> Holding:
    return Holding(
        namespace=pod.namespace,
        pod=pod.name,
        node=pod.spec.node_name or None,
        since=pod.status.start_time,
        status=pod.status.phase,
        of=of,
        **card,
    )


def _cores(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    return frozenset(range(int(first), int(last or first) + 1))


def _load(report: Report | None, key: CardKey, cores: frozenset[int] | None) -> float | None:
    """The mean load of these cores of a card, or of all of them (None)."""
    loads = [
        core.utilization
        for card in (report.cards if report else ())
        for core in (card.reading.cores if card.reading else ())
        if key.name == card.name and key.family in ("", card.family)
        if core.utilization is not None and (cores is None or core.core in cores)
    ]
    return round(sum(loads) / len(loads), 1) if loads else None
