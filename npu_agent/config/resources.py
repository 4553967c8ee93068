"""The resources of a config, and the API by which cards are offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from npu_agent.config.schema import Config
from npu_agent.core.offer import Resource

_CORES = {"Fusion": None, "Single": 1}
"""Cores of a device for each defaultPe; None is the whole card."""


def resources_of(config: Config, core_counts: Mapping[str, int]) -> tuple[Resource, ...]:
    """Returns the resources that the config asks for.

    A family that `resources` names is not in the default resource: no core is offered twice.
    `core_counts` has the cores of a card, for every family there is.
    """
    widths: dict[str, dict[str, int]] = {}
    usual = _CORES[config.default_pe]
    named = {spec.family for spec in config.resources}

    for spec in config.resources:
        cores = spec.cores_per_device or usual or core_counts[spec.family]
        widths.setdefault(spec.name, {})[spec.family] = cores
    for family, count in core_counts.items():
        if family not in named:
            widths.setdefault(config.resource_name, {})[family] = usual or count
    return tuple(Resource(name=n, widths=tuple(w.items())) for n, w in widths.items())


def offered_by(
    config: Config,
    families: Collection[str],
    api: Literal["device-plugin", "dra"],
    node_name: str | None,
    *,
    auto: bool | None,
) -> frozenset[str]:
    """Returns the families whose cards the config wants to be offered by this API on this node.

    The config says it of the family, else of the node, else of all nodes. `auto` is whether that
    word stands for DRA here; None: not known yet, and neither API has those families.
    """
    stands_for = {True: "dra", False: "device-plugin", None: None}[auto]
    by_family = {spec.family: spec.api for spec in config.resources}
    default = _api_of_node(config, node_name)
    words = {family: by_family.get(family) or default for family in families}
    return frozenset(
        family for family, word in words.items() if (stands_for if word == "auto" else word) == api
    )


def asks_for(config: Config, api: Literal["auto", "dra"], node_name: str | None = None) -> bool:
    """Whether the config has this word for any of the cards, on this node if it is named."""
    return api in (_api_of_node(config, node_name), *(spec.api for spec in config.resources))


def _api_of_node(config: Config, node_name: str | None) -> str:
    nodes = {node.node_name: node.api for node in config.allocation.nodes}
    return nodes.get(node_name or "", config.allocation.api)
