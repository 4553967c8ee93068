"""What the API server takes of a ResourceSlice, from k8s.io/kubernetes v1.36.3,
pkg/apis/resource/validation/validation.go."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PRE = r"(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    rf"(-{_PRE}(\.{_PRE})*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?",
    re.ASCII,
)
_QUANTITY = re.compile(r"[0-9]+(Ki|Mi|Gi|Ti)?")
_TAINT_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def faults(found: Mapping[str, Any]) -> list[str]:
    """Why the API server would refuse a slice; empty if it takes it."""
    spec = found["spec"]
    devices = spec.get("devices", [])
    sets = spec.get("sharedCounters", [])
    pool = spec["pool"]
    advanced = any(device.get("taints") or device.get("consumesCounters") for device in devices)
    broken = {
        "name": not _subdomain(found["metadata"]["name"], 253),
        "driver": not _subdomain(spec["driver"], 63),
        "nodeName": not _subdomain(spec["nodeName"], 253),
        "pool.name": not _subdomain(pool["name"], 253),
        "pool.generation": not 0 <= pool["generation"] < 2**63,
        "pool.resourceSliceCount": pool["resourceSliceCount"] < 1,
        "too many devices": len(devices) > (64 if advanced else 128),
        "devices beside counters": "devices" in spec and "sharedCounters" in spec,
        "too many sets of counters": len(sets) > 8,
        "uid": not all(owner["uid"] for owner in found["metadata"]["ownerReferences"]),
    }
    return [
        *(what for what, wrong in broken.items() if wrong),
        *(fault for device in devices for fault in _of_device(device)),
        *(fault for each in sets for fault in _of_counters(each["name"], each["counters"])),
    ]


def faults_of_pool(slices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the scheduler would not use a pool; empty if it does: pools_stable.go."""
    specs = [each["spec"] for each in slices]
    devices = [device for spec in specs for device in spec.get("devices", ())]
    sets = [each for spec in specs for each in spec.get("sharedCounters", ())]
    counters = {each["name"]: each["counters"].keys() for each in sets}
    consumed = [each for device in devices for each in device.get("consumesCounters", ())]
    broken = {
        "incomplete": {spec["pool"]["resourceSliceCount"] for spec in specs} != {len(specs)},
        "device names twice": len({device["name"] for device in devices}) < len(devices),
        "sets of counters twice": len(counters) < len(sets),
        "unknown counters": any(
            not each["counters"].keys() <= counters.get(each["counterSet"], set())
            for each in consumed
        ),
    }
    return [what for what, wrong in broken.items() if wrong]


def _of_counters(name: str, counters: Mapping[str, Any]) -> Iterator[str]:
    if not _is_label(name):
        yield f"set of counters {name!r}"
    if not 1 <= len(counters) <= 32:
        yield "number of counters"
    for key, value in counters.items():
        if not _is_label(key):
            yield f"counter {key!r}"
        if value.keys() != {"value"} or not _QUANTITY.fullmatch(value["value"]):
            yield f"counter {key}: {value}"


def _is_label(text: str) -> bool:
    return re.fullmatch(_LABEL, text) is not None and len(text) <= 63


def _of_device(device: Mapping[str, Any]) -> Iterator[str]:
    if not _is_label(device["name"]):
        yield f"device name {device['name']!r}"
    attributes, capacity = device["attributes"], device["capacity"]
    if len(attributes) + len(capacity) > 32:
        yield "too many attributes and capacities"
    for key in (*attributes, *capacity):
        domain, slash, id_ = key.rpartition("/")
        if not (_C_IDENTIFIER.fullmatch(id_) and len(id_) <= 32):
            yield f"attribute {key!r}"
        if slash and not _subdomain(domain, 63):
            yield f"domain of attribute {key!r}"
    for key, value in attributes.items():
        if len(value) != 1 or not _good(*next(iter(value.items()))):
            yield f"value {value} of attribute {key}"
    for key, value in capacity.items():
        if value.keys() != {"value"} or not _QUANTITY.fullmatch(value["value"]):
            yield f"capacity {key}: {value}"
    consumed = device.get("consumesCounters", [])
    if len(consumed) > 2:
        yield "too many sets of counters consumed"
    for each in consumed:
        yield from _of_counters(each["counterSet"], each["counters"])
    taints = device.get("taints", [])
    if len(taints) > 16:
        yield "too many taints"
    for taint in taints:
        if not _TAINT_KEY.fullmatch(taint["key"]):
            yield f"taint {taint['key']!r}"
        if taint["effect"] not in ("NoSchedule", "NoExecute", "None"):
            yield f"effect {taint['effect']!r}"


def _good(kind: str, value: object) -> bool:
    match kind, value:
        case "bool", bool():
            return True
        case "int", int():
            return not isinstance(value, bool) and -(2**63) <= value < 2**63
        case "string", str():
            return len(value.encode()) <= 64
        case "version", str():
            return len(value) <= 64 and _SEMVER.fullmatch(value) is not None
    return False


def _subdomain(text: str, longest: int) -> bool:
    return len(text) <= longest and _SUBDOMAIN.fullmatch(text) is not None
