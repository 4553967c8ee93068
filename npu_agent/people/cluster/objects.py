"""The objects that were read from a cluster."""

from __future__ import annotations

import msgspec

from npu_agent.kube.objects import (
    ApiTaint,
    ClaimSpec,
    Condition,
    Node,
    Object,
    Plain,
    ResourceClaim,
    ResourceSlice,
    Struct,
)
from npu_agent.people.cluster.pods import DaemonSet, Pod


class ClassSpec(Struct, frozen=True):
    """Selectors are ``{"cel": {"expression": ...}}``."""

    selectors: tuple[Plain, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(Object, frozen=True):
    """A DeviceClass."""

    spec: ClassSpec = ClassSpec()


class ClaimTemplateSpec(Struct, frozen=True):
    """The claim that is made of it."""

    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(Object, frozen=True):
    """A ResourceClaimTemplate."""

    spec: ClaimTemplateSpec = ClaimTemplateSpec()


class DeviceSelector(Struct, frozen=True):
    """Devices by name; a field that is missing holds for all."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class TaintRuleSpec(Struct, frozen=True):
    """A taint for some devices; without a selector for none."""

    taint: ApiTaint
    device_selector: DeviceSelector | None = None


class DeviceTaintRule(Object, frozen=True):
    """A DeviceTaintRule, by which an administrator taints devices."""

    spec: TaintRuleSpec


def condition(of: tuple[Condition, ...], type_: str) -> Condition | None:
    return next((condition for condition in of if condition.type == type_), None)


def expressions(of: Plain) -> list[str]:
    """The CEL selectors of a request."""
    return [item["cel"]["expression"] for item in of.get("selectors") or () if "cel" in item]


class Cluster(msgspec.Struct, frozen=True):
    """The objects of a cluster; kinds that may not be read are empty and in `refused`."""

    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    claims: tuple[ResourceClaim, ...] = ()
    templates: tuple[ResourceClaimTemplate, ...] = ()
    slices: tuple[ResourceSlice, ...] = ()
    classes: tuple[DeviceClass, ...] = ()
    taint_rules: tuple[DeviceTaintRule, ...] = ()
    daemon_sets: tuple[DaemonSet, ...] = ()
    """Those with the agent's label."""
    refused: dict[str, str] = {}
    """By kind, ``ResourceSlice``, why it was not read, in a sentence."""
