"""The vendors of cards: a folder for each, and its line below. Who puts parts together starts here.

docs/dev/add-a-vendor.md leads through a new one.
"""

from __future__ import annotations

from npu_agent.core.vendor import Vendor, merged
from npu_agent.vendors.furiosa.sysfs import Furiosa

VENDORS: tuple[type[Vendor], ...] = (
    Furiosa,
)  # fmt: skip
"""Every vendor; the first one's defaults are the product's."""

SPECS = tuple(vendor.spec for vendor in VENDORS)
REGISTRY = merged(SPECS)
"""What all of them call things: what the config is checked against."""
DRIVERS = tuple(words.dra.driver for words in SPECS if words.dra)
"""The DRA drivers of all of them."""
CDI_KINDS = tuple(kind for vendor in VENDORS for kind in vendor.profile.cdi_kinds)
"""The kinds of CDI devices of all of them."""
