"""The vendor of the cards, whose folder no other module names.

Another vendor is a folder next to it: docs/dev/add-a-family.md says what else changes.
"""

from __future__ import annotations

from npu_agent.core.vendor import Vendor
from npu_agent.vendors.furiosa.sysfs import Furiosa

VENDOR: type[Vendor] = Furiosa
SPEC = VENDOR.spec
DRA = VENDOR.dra
PROFILE = VENDOR.profile
