"""Which resources a config asks for."""

from __future__ import annotations

from collections.abc import Mapping

from npu_agent.config.schema import Config
from npu_agent.core.offer import Resource, resources

_CORES = {"Fusion": None, "Single": 1}
"""Cores of a device for each defaultPe; None is the whole card."""


def resources_of(config: Config, core_counts: Mapping[str, int]) -> tuple[Resource, ...]:
    """The resources that `config` asks for.

    Args:
        config: what is in force.
        core_counts: every family there is, and how many cores its cards have.
    """
    overrides = tuple((spec.name, spec.family, spec.cores_per_device) for spec in config.resources)
    return resources(
        config.resource_name, _CORES[config.default_pe], overrides, core_counts=core_counts
    )
