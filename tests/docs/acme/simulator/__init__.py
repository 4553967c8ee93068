"""Acme's driver tree."""

from __future__ import annotations

import uuid

from npu_agent.people.simulator.cards import CardFamily

from . import driver

FAMILIES = (
    CardFamily(
        name="anvil",
        title="Acme Anvil",
        driver=driver,
        cores=2,
        clock_mhz=1000,
        idle_watts=5.0,
        busy_watts=50.0,
        identities=uuid.UUID("ac3e0000-1200-4e50-8000-6e70752d6167"),
        serial="ANVIL",
        dev_major=507,
        revision="A0",
        driver_version="1.0.0, 0000000",
        firmware_version="",
    ),
)
