"""Which resources a config asks for, and by which API cards are offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from npu_agent.config.schema import Config
from npu_agent.core.offer import Resource, resources

Api = Literal["device-plugin", "dra"]

_CORES = {"Fusion": None, "Single": 1}
"""Cores of a device for each defaultPe; None is the whole card."""


def resources_of(
    config: Config, core_counts: Mapping[str, int], families: Collection[str] | None = None
) -> tuple[Resource, ...]:
    """The resources that `config` asks for.

    Args:
        config: what is in force.
        core_counts: every family there is, and how many cores its cards have.
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


def offered_by(
    config: Config, families: Collection[str], api: Api, *, dra_available: bool | None
) -> frozenset[str]:
    """The families whose cards an API offers.

    Args:
        config: what is in force.
        families: every family there is.
        api: ``device-plugin`` or ``dra``.
        dra_available: whether this node can do DRA. None: that is not known yet, and ``auto``
            offers a card by neither.
    """
    own = {spec.family: spec.api for spec in config.resources}
    auto = {True: "dra", False: "device-plugin", None: None}[dra_available]
    chosen = {family: own.get(family) or config.allocation.api for family in families}
    return frozenset(
        family for family, word in chosen.items() if (auto if word == "auto" else word) == api
    )


def asks_for(config: Config, api: Literal["auto", "dra"]) -> bool:
    """Whether the config has this word for any of the cards."""
    return api in (config.allocation.api, *(spec.api for spec in config.resources))
