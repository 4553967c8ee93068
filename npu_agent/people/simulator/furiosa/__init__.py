"""FuriosaAI's driver tree. Shares no code with `npu_agent.vendors`: it is to find faults there."""

import uuid

from npu_agent.people.simulator.cards import CardFamily
from npu_agent.people.simulator.furiosa import driver

_IDENTITIES = uuid.UUID("1ed20000-1200-4e50-8000-6e70752d6167")

# The counters of a Warboy belong to the control processor of a PE: the "ne operation" clock. At
# 1 GHz a 32-bit counter wraps after 4.3 s of full load, so a reader has to read more often.
FAMILIES = (
    CardFamily(
        name="warboy",
        title="FuriosaAI Warboy",
        driver=driver,
        cores=2,
        clock_mhz=1000,
        idle_watts=1.37,
        busy_watts=55.0,
        identities=_IDENTITIES,
        serial="WBYB0236FH",
        dev_major=509,
        revision="B0",
        driver_version="1.9.2, 3def9c2",
        firmware_version="1.6.0, c1bebfd",
    ),
    CardFamily(
        name="rngd",
        title="FuriosaAI RNGD",
        driver=driver,
        cores=8,
        clock_mhz=2000,
        idle_watts=37.0,
        busy_watts=180.0,
        identities=_IDENTITIES,
        serial="RNGD0125FH",
        dev_major=508,
        revision="B0",
        driver_version="2026.3.1, e28c5c0",
        firmware_version="2026.2.2, c96cc0d",
        older={driver.OLD: ("2025.4.0~dev0, 7e25130", "2025.4.0, 9a1f0c3")},
    ),
)
"""The families that can be simulated."""
