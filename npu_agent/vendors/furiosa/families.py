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
"""In the order in which they are searched."""

__all__ = ["FAMILIES", "Family"]
