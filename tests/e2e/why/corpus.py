"""Random cases: a few Nodes with cards, what holds some of them, and Pods that ask for some.

A case has names, a driver, a class and a label of its own, so that many share one cluster.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SPACE = "default"
LABEL = "case"
_HOST = "kubernetes.io/hostname"


@dataclass
class Case:
    """One case; `objects` are there before its Pods."""

    name: str
    nodes: list[str] = field(default_factory=list)
    objects: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    """What each copy of the Pod has of its own."""
    pod: Json = field(default_factory=dict)

    def copy(self, node: str = "") -> tuple[list[Json], Json]:
        """The Pod with its own claims; pinned to a Node, if one is given."""
        suffix = node.removeprefix(self.name) or "-any"
        claims, pod = deepcopy(self.claims), deepcopy(self.pod)
        named = {one["metadata"]["name"]: one for one in claims}
        for one in claims:
            one["metadata"]["name"] += suffix
        for one in pod["spec"].get("resourceClaims", ()):
            if one["resourceClaimName"] in named:
                one["resourceClaimName"] += suffix
        pod["metadata"]["name"] += suffix
        if node:
            pod["spec"]["nodeSelector"][_HOST] = node
        return claims, pod


def case(seed: int, number: int) -> Case:
    return _Maker(random.Random(f"{seed}-{number}"), f"s{seed}c{number}").made()


def thing(kind: str, name: str, space: str = "", **fields: Any) -> Json:
    group = "v1" if kind in ("Node", "Pod") else "resource.k8s.io/v1"
    meta: Json = {"name": name, **({"namespace": space} if space else {})}
    meta |= fields.pop("metadata", {})
    return {"apiVersion": group, "kind": kind, "metadata": meta, **fields}


class _Maker:
    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng, self.name = rng, name
        self.driver = f"{name}.furiosa.ai"
        self.resource = f"{name}.furiosa.ai/npu"
        self.case = Case(name)
        self.devices: dict[str, list[str]] = {}
        self.plugin: dict[str, int] = {}

    def odds(self, share: float) -> bool:
        return self.rng.random() < share

    def made(self) -> Case:
        for at in range(self.rng.randint(2, 3)):
            self._node(f"{self.name}-n{at}")
        self._class()
        if self.odds(0.2):
            self._rule()
        self._holders()
        self._pod()
        return self.case

    def _node(self, name: str) -> None:
        rng = self.rng
        labels = {LABEL: self.name, _HOST: name, "disk": rng.choice(["ssd", "hdd"])}
        there = {"cpu": rng.choice(["2", "4"]), "memory": "8Gi", "pods": rng.choice(["1", "20"])}
        spec: Json = {"taints": []}
        if self.odds(0.15):
            spec["unschedulable"] = True
        if self.odds(0.2):
            effect = rng.choice(["NoSchedule", "NoExecute", "PreferNoSchedule"])
            spec["taints"].append({"key": "team", "value": "a", "effect": effect})
        if self.odds(0.35):
            self.plugin[name] = rng.randint(0, 3)
            there[self.resource] = str(self.plugin[name])
        status = {"allocatable": there, "capacity": there}
        self.case.nodes.append(name)
        self.case.objects.append(
            thing("Node", name, metadata={"labels": labels}, spec=spec, status=status)
        )
        if name not in self.plugin or self.odds(0.2):
            self._slices(name)

    def _slices(self, node: str) -> None:
        cards = [f"npu-{at}" for at in range(self.rng.randint(1, 3))]
        cut = self.odds(0.5)
        devices = [one for card in cards for one in self._devices(card, cut=cut)]
        self.devices[node] = [one["name"] for one in devices]
        count = 2 if cut else 1
        if self.odds(0.08):
            count += 1  # the pool is being updated
        pool = {"name": node, "generation": 1, "resourceSliceCount": count}
        spec: Json = {"driver": self.driver, "nodeName": node, "pool": pool}
        if cut:
            sets = [
                {"name": card, "counters": {f"core-{n}": {"value": "1"} for n in range(8)}}
                for card in cards
            ]
            counters = thing("ResourceSlice", f"0-{node}", spec={**spec, "sharedCounters": sets})
            self.case.objects.append(counters)
        self.case.objects.append(
            thing("ResourceSlice", f"1-{node}", spec={**spec, "devices": devices})
        )

    def _devices(self, card: str, *, cut: bool) -> list[Json]:
        root = self.rng.choice(["a", "b"])
        taints = []
        if self.odds(0.2):
            effect = self.rng.choice(["NoSchedule", "NoExecute", "None"])
            taints = [{"key": f"{self.driver}/unhealthy", "effect": effect}]
        speed = {"speed": {"int": self.rng.randint(1, 3)}} if self.odds(0.85) else {}
        version = {"firmware": {"version": self.rng.choice(["1.2.3", "1.10.0", "2.0.0-rc.1"])}}
        memory = self.rng.choice(["24Gi", "48Gi"])
        found = []
        for width in (8, 4, 2) if cut else (8,):
            for first in range(0, 8, width):
                one: Json = {
                    "name": card if width == 8 else f"{card}-cores-{first}-{first + width - 1}",
                    "attributes": {
                        "cores": {"int": width},
                        "type": {"string": "card" if width == 8 else "cores"},
                        "resource.kubernetes.io/pcieRoot": {"string": f"pci{root}"},
                        **speed,
                        **version,
                    },
                    "capacity": {"memory": {"value": memory}},
                    "taints": taints,
                }
                if cut:
                    taken = {f"core-{n}": {"value": "1"} for n in range(first, first + width)}
                    one["consumesCounters"] = [{"counterSet": card, "counters": taken}]
                found.append(one)
        return found

    def _class(self) -> None:
        spec: Json = {"selectors": [{"cel": {"expression": f'device.driver == "{self.driver}"'}}]}
        if self.odds(0.7):
            spec["extendedResourceName"] = self.resource
        self.case.objects.append(thing("DeviceClass", self.name, spec=spec))

    def _rule(self) -> None:
        selector = {"driver": self.driver, "device": "npu-0"}
        if self.odds(0.5):
            selector["pool"] = self.rng.choice(self.case.nodes)
        taint = {"key": "repair", "value": "fan", "effect": self.rng.choice(["NoSchedule", "None"])}
        spec = {"deviceSelector": selector, "taint": taint}
        self.case.objects.append(thing("DeviceTaintRule", self.name, spec=spec))

    def _holders(self) -> None:
        for node, number in self.plugin.items():
            for at in range(self.rng.randint(0, number)):
                name = f"{node}-user{at}"
                asks = {self.resource: "1", "cpu": "500m"}
                self.case.objects.append(self._plain_pod(name, asks, nodeName=node))
        for node, devices in self.devices.items():
            # Parts of one card may overlap here: the scheduler counts what there is.
            for device in self.rng.sample(devices, self.rng.randint(0, min(2, len(devices)))):
                self.case.objects.append(self._held(f"{node}-{device}", node, device))

    def _held(self, name: str, node: str, device: str) -> Json:
        result = {"request": "npu", "driver": self.driver, "pool": node, "device": device}
        expression = {"key": "metadata.name", "operator": "In", "values": [node]}
        where = {"nodeSelectorTerms": [{"matchFields": [expression]}]}
        users = [{"resource": "pods", "name": f"{name}-user", "uid": f"{name}-user"}]
        status = {
            "allocation": {"devices": {"results": [result]}, "nodeSelector": where},
            "reservedFor": users,
        }
        return self._claim(name, {"requests": [self._request("npu", [])]}, status=status)

    def _claim(self, name: str, devices: Json, **fields: Any) -> Json:
        return thing("ResourceClaim", name, SPACE, spec={"devices": devices}, **fields)

    def _request(self, name: str, selectors: list[str], **fields: Any) -> Json:
        exactly: Json = {"deviceClassName": self.name, **fields}
        if selectors:
            exactly["selectors"] = [{"cel": {"expression": one}} for one in selectors]
        return {"name": name, "exactly": exactly}

    def _selectors(self) -> list[str]:
        own, memory = f'device.attributes["{self.driver}"]', f'device.capacity["{self.driver}"]'
        every = [
            f"{own}.cores == {self.rng.choice([2, 4, 8, 16])}",
            f'{own}.type == "card" && {own}.cores > 4',
            f"{own}.speed >= {self.rng.randint(1, 3)}",
            f'"speed" in {own} && {own}.speed >= 2',
            f"{own}.?speed.orValue(0) > 1 || {own}.cores == 2",
            f'{own}.firmware.isGreaterThan(semver("1.2.3"))',
            f'{own}.firmware.compareTo(semver("2.0.0")) < 0',
            f'{memory}.memory.compareTo(quantity("{self.rng.choice(["24Gi", "32Gi"])}")) >= 0',
            f'{own}.type.matches("^c[ao]r") && {own}.cores in [4, 8]',
            f"cel.bind(own, {own}, own.cores == 8)",
            'device.attributes["no.such.domain"].x == 1',
            f'device.attributes["resource.kubernetes.io"].pcieRoot == "pci{self.rng.choice("ab")}"',
        ]
        if self.odds(0.1):
            return [every[10]]
        return self.rng.sample([*every[:10], every[11]], self.rng.choice([0, 1, 1, 2]))

    def _options(self) -> Json:
        found: Json = {}
        if self.odds(0.4):
            found["count"] = self.rng.randint(2, 3)
        elif self.odds(0.15):
            found["allocationMode"] = "All"
        if self.odds(0.12):
            found["adminAccess"] = True
        if self.odds(0.25):
            toleration = self.rng.choice(
                [
                    {"operator": "Exists"},
                    {"key": f"{self.driver}/unhealthy", "operator": "Exists"},
                    {"key": "repair", "operator": "Equal", "value": "fan", "effect": "NoSchedule"},
                    {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3},
                ]
            )
            found["tolerations"] = [toleration]
        return found

    def _own_claim(self, name: str) -> Json:
        requests = []
        for at in range(self.rng.choice([1, 1, 2])):
            if self.odds(0.2):
                first = [
                    {"name": f"f{n}", **self._request("x", self._selectors())["exactly"]}
                    for n in range(2)
                ]
                first[0]["count"] = self.rng.randint(1, 3)
                requests.append({"name": f"r{at}", "firstAvailable": first})
            else:
                requests.append(self._request(f"r{at}", self._selectors(), **self._options()))
        devices: Json = {"requests": requests}
        if self.odds(0.3):
            which = self.rng.choice(["matchAttribute", "distinctAttribute"])
            devices["constraints"] = [{which: "resource.kubernetes.io/pcieRoot"}]
            if self.odds(0.3):
                devices["constraints"] = [{"matchAttribute": f"{self.driver}/speed"}]
        return self._claim(name, devices)

    def _plain_pod(self, name: str, requests: dict[str, str], **spec: Any) -> Json:
        resources = {"requests": requests, "limits": requests}
        container = {"name": "main", "image": "localhost/pause:1", "resources": resources}
        return thing("Pod", name, SPACE, spec={"containers": [container], **spec})

    def _pod(self) -> None:
        spec: Json = {"nodeSelector": {LABEL: self.name}, "tolerations": []}
        if self.odds(0.25):
            spec["nodeSelector"]["disk"] = "ssd"
        if self.odds(0.3):
            spec["tolerations"].append({"key": "team", "operator": "Exists"})
        if self.odds(0.15):
            spec["tolerations"].append({"operator": "Exists", "effect": "NoSchedule"})
        asks = {"cpu": self.rng.choice(["100m", "2", "3500m"])}
        if self.odds(0.4):
            asks[self.resource] = str(self.rng.randint(1, 3))
        elif self.odds(0.1):
            asks[f"deviceclass.resource.kubernetes.io/{self.name}"] = "1"
        pod = self._plain_pod(f"{self.name}-p", asks, **spec)
        if len(asks) == 1 or self.odds(0.1):
            self._give_claims(pod)
        if self.odds(0.15):
            more = {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
            if self.resource in asks:
                more = {key: {**one, self.resource: "2"} for key, one in more.items()}
            init = {"name": "init", "image": "localhost/pause:1", "resources": more}
            pod["spec"]["initContainers"] = [init]
        self.case.pod = pod

    def _give_claims(self, pod: Json) -> None:
        self.case.claims = [
            self._own_claim(f"{self.name}-claim{at}") for at in range(self.rng.choice([1, 1, 2]))
        ]
        names = [one["metadata"]["name"] for one in self.case.claims]
        held = [one for one in self.case.objects if one["kind"] == "ResourceClaim"]
        if held and self.odds(0.15):
            names.append(self.rng.choice(held)["metadata"]["name"])
        pod["spec"]["resourceClaims"] = [
            {"name": f"c{at}", "resourceClaimName": name} for at, name in enumerate(names)
        ]
        pod["spec"]["containers"][0]["resources"]["claims"] = [
            {"name": f"c{at}"} for at in range(len(names))
        ]
