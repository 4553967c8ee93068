"""DRA: could these claims be allocated on this Node now, and what of which devices. Pure.

Goes as the scheduler's allocator goes: claim by claim, request by request, the devices in the
order of pools, slices and devices. The first that fits is taken, and given back where the rest
then fails. The order matters, as a selector that fails on a device ends the Pod's scheduling.

Source: k8s.io/dynamic-resource-allocation/structured/internal/incubating of Kubernetes 1.37.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from npu_agent.kube.objects import Device, Node, Plain, ResourceClaim, ResourceSlice, Taint
from npu_agent.people.cluster.cel import CannotJudgeError, CelError, matches
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.quantity import quantity
from npu_agent.people.cluster.scheduling import IMPLICIT, matches_selector, tolerates

MOST_DEVICES = 32
"""In the allocation of a claim."""
_STEPS = 20_000
"""Devices that are tried before the search is given up: the scheduler has 10 s for a Node."""


class GivesUpError(Exception):
    """The scheduler gives the Pod up here, even if other Nodes would do; the message says why."""


class DeviceId(NamedTuple):
    """The identity of a device in an allocation."""

    driver: str
    pool: str
    device: str


Counter = tuple[str, str]
"""A counter set and the name of a counter in it."""


@dataclass(frozen=True, eq=False)
class Offered:
    """A device that the Node can use."""

    id: DeviceId
    device: Device
    taints: tuple[Taint, ...]
    pool: NodePool
    everywhere: bool
    """Whether the slice says so; else the device says which Nodes can use it."""

    @cached_property
    def counters(self) -> list[tuple[Counter, Fraction]]:
        """Returns the counters that it consumes."""
        return [
            ((one.counter_set, name), quantity(counter["value"]))
            for one in self.device.consumes_counters
            for name, counter in one.counters.items()
        ]

    def attribute(self, name: str) -> tuple[str, Any] | None:
        """Its type and value; None: the device lacks it."""
        domain, _, key = name.partition("/")
        typed = self.device.attributes.get(name)
        if typed is None and domain == self.id.driver:
            typed = self.device.attributes.get(key)
        return next(iter(typed.items()), None) if typed else None


@dataclass(eq=False)
class NodePool:
    """A pool as one Node sees it."""

    trouble: str = ""
    """Why nothing of it can be allocated: ``is being updated``."""
    devices: list[Offered] = field(default_factory=list)
    free: dict[Counter, Fraction] = field(default_factory=dict)
    """Of each counter what allocated devices leave."""

    def has(self, device: Offered, taken: dict[Counter, Fraction]) -> bool:
        """Whether the counters suffice, with what this search has taken already."""
        wanted = defaultdict(Fraction, taken)
        for counter, amount in device.counters:
            wanted[counter] += amount
        return all(wanted[counter] <= free for counter, free in self.free.items())


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, or one of its alternatives."""

    name: str
    """``npu`` or ``npu/whole``."""
    spec: Plain
    selectors: tuple[tuple[str, str], ...]
    """Whose each is, and its expression: the class's, then the request's."""

    @property
    def all(self) -> bool:
        return self.spec.get("allocationMode") == "All"

    @property
    def count(self) -> int:
        return int(self.spec.get("count", 1))

    @property
    def admin(self) -> bool:
        """Whether devices in use can be allocated too."""
        return bool(self.spec.get("adminAccess"))

    def tolerates(self, taint: Taint) -> bool:
        return any(tolerates(one, taint) for one in self.spec.get("tolerations") or ())

    def barred(self, device: Offered) -> Taint | None:
        """The taint that keeps it from being allocated."""
        bars = (one for one in device.taints if one.bars and not self.tolerates(one))
        return next(bars, None)

    def selects(self, device: Offered, node: Node) -> bool:
        """Whether the selectors choose it, and the Node can use it.

        Raises:
            GivesUpError: a selector fails on the device.
            CannotJudgeError: it is not known.
        """
        for whose, expression in self.selectors:
            try:
                if not matches(expression, device.device, device.id.driver):
                    return False
            except CelError as error:
                what = f"the selector of {whose} fails on device {device.id.device}"
                raise GivesUpError(f"{what}: {error} ({expression})") from None
        return device.everywhere or usable(node, device.device)


def usable(node: Node, of: Device | Any) -> bool:
    """Whether a device, or the devices of a slice's spec, are for this Node."""
    if of.node_name:
        return bool(of.node_name == node.name)
    return bool(of.all_nodes) or bool(of.node_selector and matches_selector(node, of.node_selector))


class Devices:
    """The devices of the cluster and their holders."""

    def __init__(self, cluster: Cluster) -> None:
        self._slices = cluster.slices
        self._rules = cluster.taint_rules
        self.classes = {one.name: one for one in cluster.classes}
        self.holders: dict[DeviceId, ResourceClaim] = {}
        self.shared: set[DeviceId] = set()
        for claim in cluster.claims:
            for result in claim.results:
                device = DeviceId(result.driver, result.pool, result.device)
                if result.share_id is not None:
                    self.shared.add(device)
                elif not result.admin_access:
                    self.holders[device] = claim
        self._by_node: dict[str, list[ResourceSlice]] = defaultdict(list)
        for slice_ in cluster.slices:
            self._by_node[slice_.spec.node_name or ""].append(slice_)
        self._pools: dict[str, dict[tuple[str, str], NodePool]] = {}

    def by_extended_name(self, resource: str) -> str | None:
        """The class of a resource's name: the newest that has it, else the lower name."""
        implicit = resource.removeprefix(IMPLICIT)
        if implicit != resource:
            return implicit if implicit in self.classes else None
        named = [
            one for one in self.classes.values() if one.spec.extended_resource_name == resource
        ]
        newest = max((one.metadata.creation_timestamp or "" for one in named), default="")
        return min(
            (one.name for one in named if (one.metadata.creation_timestamp or "") == newest),
            default=None,
        )

    def pools(self, node: Node) -> dict[tuple[str, str], NodePool]:
        """Returns the pools that the Node can use, by driver, in the allocator's order."""
        if node.name not in self._pools:
            self._pools[node.name] = dict(self._gather(node))
        return self._pools[node.name]

    def of(self, node: Node) -> list[Offered]:
        """The devices that can be allocated there, in the allocator's order."""
        return [each for pool in self.pools(node).values() for each in pool.devices]

    def asked(self, request: Plain) -> list[Asked]:
        """The request as alternatives, the best first.

        Raises:
            GivesUpError: its class is missing.
        """
        name, first = request["name"], request.get("firstAvailable")
        if first:
            return [self._asked(f"{name}/{one['name']}", one) for one in first]
        if "exactly" not in request:
            raise CannotJudgeError(f"request {name} is of a form that is not known")
        return [self._asked(name, request["exactly"])]

    def _asked(self, name: str, spec: Plain) -> Asked:
        class_ = self.classes.get(spec.get("deviceClassName", ""))
        if class_ is None:
            raise GivesUpError(
                f"request {name} asks for DeviceClass {spec.get('deviceClassName')}, "
                "which does not exist"
            )
        if spec.get("capacity") or spec.get("derivedAttributes"):
            raise CannotJudgeError(f"request {name} asks for a part of a device's capacity")
        whose = (
            *((f"DeviceClass {class_.name}", one) for one in class_.spec.selectors),
            *((f"request {name}", one) for one in spec.get("selectors") or ()),
        )
        return Asked(name, spec, tuple((of, one["cel"]["expression"]) for of, one in whose))

    def _gather(self, node: Node) -> Iterator[tuple[tuple[str, str], NodePool]]:
        found: dict[tuple[str, str], list[ResourceSlice]] = defaultdict(list)
        for slice_ in (*self._by_node[node.name], *self._by_node[""]):
            if self._concerns(slice_, node):
                found[slice_.spec.driver, slice_.spec.pool.name].append(slice_)
        for key in sorted(found):
            newest = max(one.spec.pool.generation for one in found[key])
            here = [one for one in found[key] if one.spec.pool.generation == newest]
            pool = self._pool(key, here)
            if pool is not None:
                yield key, pool

    def _concerns(self, slice_: ResourceSlice, node: Node) -> bool:
        if slice_.spec.per_device_node_selection:
            return any(usable(node, device) for device in slice_.spec.devices)
        return usable(node, slice_.spec)

    def _pool(self, key: tuple[str, str], here: list[ResourceSlice]) -> NodePool | None:
        """The pool of slices of one generation; None: a newer one replaces it."""
        generation, wanted = here[0].spec.pool.generation, here[0].spec.pool.resource_slice_count
        everywhere = here
        if len(here) != wanted:
            of_pool = [one for one in self._slices if (one.spec.driver, one.spec.pool.name) == key]
            if any(one.spec.pool.generation > generation for one in of_pool):
                return None
            everywhere = [one for one in of_pool if one.spec.pool.generation == generation]
        if len(everywhere) != wanted:
            return NodePool(trouble="is being updated: not all of its ResourceSlices are there")
        pool = NodePool()
        for slice_ in sorted(here, key=lambda one: one.name):
            pool.devices += self._offered(slice_, pool)
        others = [one for one in everywhere if all(one is not each for each in here)]
        elsewhere = [each for one in others for each in self._offered(one, pool)]
        sets = [one for slice_ in everywhere for one in slice_.spec.shared_counters]
        pool.trouble = _invalid([one.name for one in sets], pool.devices)
        pool.free = {
            (one.name, name): quantity(counter["value"])
            for one in sets
            for name, counter in one.counters.items()
        }
        for each in (*pool.devices, *elsewhere):
            for counter, amount in each.counters:
                if counter not in pool.free:
                    pool.trouble = f"is invalid: it has no counter {'/'.join(counter)}"
                elif each.id in self.holders or each.id in self.shared:
                    pool.free[counter] -= amount
        if pool.trouble:
            pool.devices = []
        return pool

    def _offered(self, slice_: ResourceSlice, pool: NodePool) -> Iterator[Offered]:
        spec = slice_.spec
        for device in spec.devices:
            id_ = DeviceId(spec.driver, spec.pool.name, device.name)
            ruled = (one.spec.taint for one in self._rules if _meant(one.spec.device_selector, id_))
            taints = (*device.taints, *ruled)
            yield Offered(id_, device, taints, pool, not spec.per_device_node_selection)


def _meant(selector: Any, device: DeviceId) -> bool:
    if selector is None:
        return False
    wanted = (selector.driver, selector.pool, selector.device)
    return all(one in (None, is_) for one, is_ in zip(wanted, device, strict=True))


def _invalid(sets: Sequence[str], devices: Sequence[Offered]) -> str:
    for what, names in (("counter set", sets), ("device", [one.id.device for one in devices])):
        if twice := next((name for name in names if names.count(name) > 1), None):
            return f"is invalid: it has {what} {twice} twice"
    return ""


class _Constraint:
    """A constraint: devices share the value of an attribute, or all differ in it."""

    def __init__(self, spec: Plain) -> None:
        self.requests = spec.get("requests") or ()
        self.attribute: str = spec.get("matchAttribute") or spec.get("distinctAttribute") or ""
        self.distinct = "matchAttribute" not in spec
        self.values: list[Any] = []
        if not self.attribute:
            raise CannotJudgeError("the claim has a constraint that is not known")

    def concerns(self, request: str) -> bool:
        names = {request, request.partition("/")[0]}
        return not self.requests or not names.isdisjoint(self.requests)

    def allows(self, device: Offered) -> bool:
        value = device.attribute(self.attribute)
        if value is None:
            return False
        return value not in self.values if self.distinct else value in (self.values or [value])


Given = tuple[str, DeviceId]
"""A request, or alternative, and a device for it."""


class Search:
    """The allocator at one Node."""

    def __init__(self, devices: Devices, node: Node, claims: Sequence[ResourceClaim]) -> None:
        self._devices, self._node, self._claims = devices, node, claims
        self._offered = devices.of(node)
        self._selected: dict[tuple[int, DeviceId], bool] = {}
        self._taken: dict[DeviceId, set[int]] = defaultdict(set)
        self._counters: dict[int, dict[Counter, Fraction]] = defaultdict(
            lambda: defaultdict(Fraction)
        )
        self._steps = 0
        self.given: list[list[Given]] = [[] for _ in claims]

    def run(self) -> bool:
        """Whether all claims can be allocated here; `given` then says what each gets.

        Raises:
            GivesUpError: the Pod is not scheduled at all.
            CannotJudgeError: it is not known.
        """
        self._asked = [
            [self._devices.asked(one) for one in claim.spec.devices.requests]
            for claim in self._claims
        ]
        self._all = {
            id(asked): self._everything(asked)
            for claim in self._asked
            for request in claim
            for asked in request
            if asked.all
        }
        for claim, requests in zip(self._claims, self._asked, strict=True):
            least = sum(min(map(self._count, one)) for one in requests)
            if least > MOST_DEVICES:
                what = f"asks for {least} devices, and a claim has at most {MOST_DEVICES}"
                raise GivesUpError(f"claim {claim.key} {what}")
        self._constraints = [
            [_Constraint(one) for one in claim.spec.devices.constraints] for claim in self._claims
        ]
        return self._request(0, 0)

    def _everything(self, asked: Asked) -> list[Offered]:
        """The devices that a request for all of them means."""
        for (_, name), pool in self._devices.pools(self._node).items():
            if pool.trouble:
                what = f"request {asked.name} asks for all devices, and pool {name}"
                raise GivesUpError(f"{what} {pool.trouble}")
        return [one for one in self._offered if self._selects(asked, one)]

    def _count(self, asked: Asked) -> int:
        return len(self._all[id(asked)]) if asked.all else asked.count

    def _selects(self, asked: Asked, device: Offered) -> bool:
        key = (id(asked), device.id)
        if key not in self._selected:
            self._selected[key] = asked.selects(device, self._node)
        if self._selected[key]:
            if device.device.allow_multiple_allocations:
                raise CannotJudgeError(f"device {device.id.device} can be shared by its capacity")
            if device.device.binding_conditions:
                what = "is bound when its driver says so"
                raise CannotJudgeError(f"device {device.id.device} {what}")
        return self._selected[key]

    def _request(self, claim: int, request: int) -> bool:
        if claim == len(self._claims):
            return True
        if request == len(self._asked[claim]):
            return self._request(claim + 1, 0)
        return any(
            self._more((claim, request), asked, 0, 0) for asked in self._asked[claim][request]
        )

    def _more(self, at: tuple[int, int], asked: Asked, have: int, start: int) -> bool:
        """Whether the rest can be allocated, with `have` of this request, the next from `start`."""
        claim, request = at
        wanted = self._count(asked)
        if have >= wanted and wanted:
            return self._request(claim, request + 1)
        if not wanted or wanted - have > MOST_DEVICES - len(self.given[claim]):
            return False
        if asked.all:
            device = self._all[id(asked)][have]
            return self._with(at, asked, device, (have + 1, 0))
        for index in range(start, len(self._offered)):
            device = self._offered[index]
            if (
                not self._in_use(asked, device, claim)
                and self._selects(asked, device)
                and self._with(at, asked, device, (have + 1, index + 1))
            ):
                return True
        return False

    def _in_use(self, asked: Asked, device: Offered, claim: int) -> bool:
        if asked.admin:
            return claim in self._taken[device.id]
        return device.id in self._devices.holders or bool(self._taken[device.id])

    def _with(
        self, at: tuple[int, int], asked: Asked, device: Offered, rest: tuple[int, int]
    ) -> bool:
        """Whether the rest can be allocated with this device taken."""
        self._steps += 1
        if self._steps > _STEPS:
            raise CannotJudgeError("there are too many ways to allocate the claims")
        claim, taken = at[0], self._counters[id(device.pool)]
        if (
            self._in_use(asked, device, claim)
            or (device.counters and not device.pool.has(device, taken))
            or asked.barred(device)
        ):
            return False
        bound = [one for one in self._constraints[claim] if one.concerns(asked.name)]
        if not all(one.allows(device) for one in bound):
            if asked.all:
                what = f"request {asked.name} asks for all devices, which its constraint forbids"
                raise GivesUpError(what)
            return False
        for one in bound:
            one.values.append(device.attribute(one.attribute))
        for counter, amount in device.counters:
            taken[counter] += amount
        self._taken[device.id].add(claim)
        self.given[claim].append((asked.name, device.id))
        if self._more(at, asked, *rest):
            return True
        self.given[claim].pop()
        self._taken[device.id].discard(claim)
        for counter, amount in device.counters:
            taken[counter] -= amount
        for one in bound:
            one.values.pop()
        return False
