"""The families of cards that can be simulated."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CardFamily:
    """The properties that all cards of one family share.

    `clock_mhz` is what the cycle counters count; watts are at no load and at full load; `older` are
    releases of the driver before the default one, each with the texts of its version and of the
    firmware's.
    """

    title: str
    cores: int
    clock_mhz: int
    idle_watts: float
    busy_watts: float
    serial: str
    dev_major: int
    revision: str
    driver_version: str
    firmware_version: str
    older: Mapping[str, tuple[str, str]] = field(default_factory=dict)


OLD_RNGD = "2025.4"
"""The release of RNGD's driver with error counters, and without limits and throttle reasons."""
IDENTITIES = uuid.UUID("1ed20000-1200-4e50-8000-6e70752d6167")
"""The namespace of the UUIDs of all cards."""

# The counters of a Warboy belong to the control processor of a PE: the "ne operation" clock. At
# 1 GHz a 32-bit counter wraps after 4.3 s of full load, so a reader has to read more often.
FAMILIES: Mapping[str, CardFamily] = {
    "warboy": CardFamily(
        title="FuriosaAI Warboy",
        cores=2,
        clock_mhz=1000,
        idle_watts=1.37,
        busy_watts=55.0,
        serial="WBYB0236FH",
        dev_major=509,
        revision="B0",
        driver_version="1.9.2, 3def9c2",
        firmware_version="1.6.0, c1bebfd",
    ),
    "rngd": CardFamily(
        title="FuriosaAI RNGD",
        cores=8,
        clock_mhz=2000,
        idle_watts=37.0,
        busy_watts=180.0,
        serial="RNGD0125FH",
        dev_major=508,
        revision="B0",
        driver_version="2026.3.1, e28c5c0",
        firmware_version="2026.2.2, c96cc0d",
        older={OLD_RNGD: ("2025.4.0~dev0, 7e25130", "2025.4.0, 9a1f0c3")},
    ),
}
