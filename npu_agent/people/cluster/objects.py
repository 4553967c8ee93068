"""The objects that were read from a cluster."""

from __future__ import annotations

import msgspec

from npu_agent.kube.objects import (
    DaemonSet,
    DeviceClass,
    DeviceTaintRule,
    Node,
    Pod,
    ResourceClaim,
    ResourceClaimTemplate,
    ResourceSlice,
)


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
