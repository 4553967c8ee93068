"""The resources of a config, and the API by which cards are offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from npu_agent.config.schema import Config
from npu_agent.core.api_mode import WantedApi
from npu_agent.core.offer import Resource, resources

_CORES = {"Fusion": None, "Single": 1}
"""Cores of a device for each defaultPe; None is the whole card."""


def resources_of(
    config: Config, core_counts: Mapping[str, int], families: Collection[str] | None = None
) -> tuple[Resource, ...]:
    """The resources that the config asks for.

    Args:
        config: what is in force.
        core_counts: the cores of a card, for every family there is.
        families: those that the device plugin offers, all by default; a resource without any of
            them has no devices.
    """
    overrides = tuple((spec.name, spec.family, spec.cores_per_device) for spec in config.resources)
    found = resources(
        config.resource_name, _CORES[config.default_pe], overrides, core_counts=core_counts
    )
    if families is None:
        return found
    return tuple(
        replace(one, widths=tuple(width for width in one.widths if width[0] in families))
        for one in found
    )


def wishes_of(
    config: Config,
    families: Collection[str],
    node_name: str | None,
    *,
    auto: bool | None,
    possible: bool,
) -> dict[str, WantedApi]:
    """Returns the API that the config wants for each family on this node.

    The config says it of the family, else of the node, else of all nodes. `auto` is whether that
    word stands for DRA here. None: not known yet, and cards stay where they are; so they do where
    it says `dra` and this node cannot do it (`possible`).
    """
    found = {
        "device-plugin": WantedApi.PLUGIN,
        "dra": WantedApi.DRA if possible else WantedApi.STAY,
    }
    found["auto"] = {True: found["dra"], False: WantedApi.PLUGIN, None: WantedApi.STAY}[auto]
    own = {spec.family: spec.api for spec in config.resources}
    default = _api_of_node(config, node_name)
    return {family: found[own.get(family) or default] for family in families}


def offered_by(
    config: Config,
    families: Collection[str],
    wish: WantedApi,
    node_name: str | None,
    *,
    auto: bool | None,
) -> frozenset[str]:
    """The families whose cards the config wants to be offered so: see `wishes_of`."""
    wishes = wishes_of(config, families, node_name, auto=auto, possible=True)
    return frozenset(family for family, each in wishes.items() if each is wish)


def asks_for(config: Config, api: Literal["auto", "dra"], node_name: str | None = None) -> bool:
    """Whether the config has this word for any of the cards, on this node if it is named."""
    return api in (_api_of_node(config, node_name), *(spec.api for spec in config.resources))


def _api_of_node(config: Config, node_name: str | None) -> str:
    nodes = {one.node_name: one.api for one in config.allocation.nodes}
    return nodes.get(node_name or "", config.allocation.api)
