"""DeviceClasses: whether Pods that ask by a resource name are given cards of a driver. Pure.

Start reading at `judged`. Selectors are CEL (k8s.io/dynamic-resource-allocation, cel), of which
only comparisons that are joined by ``&&`` are understood: whatever else there is counts as met, so
that a class is never said to select nothing where it might select something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.doctor.check import Finding, note, ok, unused, wrong

_SHIPPED = ("app.kubernetes.io/part-of", "npu-agent")
"""The label of our own classes: there is one for each family, whether the cluster has it or not."""
_COMPARISON = re.compile(
    r'device\.(?:driver|attributes\["(?P<domain>[^"]+)"\]\.(?P<name>\w+))'
    r'\s*==\s*(?P<value>"[^"]*"|-?\d+|true|false)'
)
_MORE_THAN_THAT = re.compile(r"\|\||[?!()]")
_LIST = (
    "kubectl get deviceclasses --sort-by=.metadata.creationTimestamp "
    "-o custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """What there is of one."""

    name: str
    resource: str = ""
    """The resource name that it stands for; "": none."""
    created: str = ""
    """``2026-11-22T07:00:00Z``: compares as the time does."""
    selectors: tuple[str, ...] = ()
    shipped: bool = False
    """Whether it came with the component dra-classes."""


def device_class(found: Mapping[str, Any]) -> DeviceClass:
    """One as the API server answers it (k8s.io/api/resource/v1, types.go)."""
    metadata, spec = found["metadata"], found.get("spec") or {}
    label, ours = _SHIPPED
    return DeviceClass(
        name=metadata["name"],
        resource=spec.get("extendedResourceName") or "",
        created=metadata.get("creationTimestamp") or "",
        selectors=tuple(
            each.get("cel", {}).get("expression", "") for each in spec.get("selectors") or ()
        ),
        shipped=(metadata.get("labels") or {}).get(label) == ours,
    )


def judged(
    driver: str,
    classes: Collection[DeviceClass],
    devices: Collection[Mapping[str, Any]],
    allocatable: Mapping[str, str],
) -> Finding:
    """What is odd about the classes of a driver.

    Args:
        driver: its name.
        classes: all of the cluster.
        devices: all of the driver's in the cluster, as they are in its ResourceSlices.
        allocatable: of the Node.
    """
    named = {each.resource for each in classes if each.resource and _concerns(each, driver)}
    if not named:
        return unused("no class has a resource name: Pods ask for cards by claims")
    several = [
        f"{resource} is the resource name of {_listed(rivals)}: the scheduler takes {rivals[0]}"
        for resource in sorted(named)
        if len(rivals := _rivals(resource, classes)) > 1
    ]
    if several:
        return wrong(
            "; ".join(several),
            "of several the newest counts: keep one, and delete the others "
            "(kubectl delete deviceclass NAME) or their extendedResourceName",
            _LIST,
        )
    details, remedies = [], []
    plugged = [one for one in sorted(named) if allocatable.get(one, "0") != "0"]
    if plugged:
        shown = ", ".join(f"{allocatable[one]} {one}" for one in plugged)
        details.append(
            f"a device plugin still offers {shown} here: Pods that ask for it are given those, "
            "and nothing of the slices of this node"
        )
        remedies.append(
            "cards move when their Pods have ended (allocation.api); else another device plugin "
            "registers that name: delete it"
        )
    idle = [
        each.name
        for each in sorted(classes, key=lambda one: one.name)
        if devices
        and not each.shipped
        and _concerns(each, driver)
        and not any(selects(each, device, driver) for device in devices)
    ]
    if idle:
        details.append(f"{', '.join(idle)}: selects no device of {driver} on any node")
        remedies.append(
            "compare its selectors with the devices' attributes "
            f"(kubectl get resourceslices --field-selector=spec.driver={driver} -o yaml)"
        )
    if details:
        return note("; ".join(details), "; ".join(remedies), _LIST)
    return ok(f"{len(named)} resource name(s), each of one class")


def selects(each: DeviceClass, device: Mapping[str, Any], driver: str) -> bool:
    """Whether a class selects a device, as far as its selectors are understood."""
    return all(_met(selector, device, driver) for selector in each.selectors)


def _met(selector: str, device: Mapping[str, Any], driver: str) -> bool:
    if _MORE_THAN_THAT.search(selector):
        return True
    compared = map(_COMPARISON.fullmatch, map(str.strip, selector.split("&&")))
    return all(_equal(one, device, driver) for one in compared if one)


def _equal(comparison: re.Match[str], device: Mapping[str, Any], driver: str) -> bool:
    value = json.loads(comparison["value"])
    if comparison["name"] is None:
        return bool(value == driver)
    name = f"{comparison['domain']}/{comparison['name']}"
    attributes = device.get("attributes") or {}
    found = attributes.get(name) or attributes.get(name.removeprefix(f"{driver}/")) or {}
    return any(type(one) is type(value) and one == value for one in found.values())


def _concerns(each: DeviceClass, driver: str) -> bool:
    """Whether it is about the driver: it names it, or a resource of its vendor."""
    vendor, domain = driver.partition(".")[2], each.resource.partition("/")[0]
    return f".{domain}".endswith(f".{vendor}") or any(
        f'"{driver}"' in selector for selector in each.selectors
    )


def _rivals(resource: str, classes: Collection[DeviceClass]) -> list[str]:
    """The names of the classes for a resource name, the one that the scheduler takes first.

    That is the newest, and of the same age the first by name (extendedresourcecache.go).
    """
    rivals = sorted(
        (each for each in classes if each.resource == resource), key=lambda one: one.name
    )
    return [each.name for each in sorted(rivals, key=lambda one: one.created, reverse=True)]


def _listed(names: Collection[str]) -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} and {last}"
