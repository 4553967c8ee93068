"""The families of cards the agent knows: one module each, and one line in the table below."""

from __future__ import annotations

from npu_agent.vendors.furiosa import rngd, warboy
from npu_agent.vendors.furiosa.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        warboy.FAMILY,
        rngd.FAMILY,
    )
}
"""Every known family by name, in the order in which they are looked for."""


def core_counts() -> dict[str, int]:
    """For each family, how many cores a card has."""
    return {family.name: family.core_count for family in FAMILIES.values()}


def widths() -> dict[str, tuple[int, ...]]:
    """For each family, how many cores a device can have: what the config is checked against."""
    return {family.name: family.widths for family in FAMILIES.values()}


__all__ = ["FAMILIES", "Family", "core_counts", "widths"]
