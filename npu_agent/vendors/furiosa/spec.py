"""This vendor's names in config files, labels and metrics, and the product's defaults."""

from __future__ import annotations

from npu_agent.core.vendor_spec import VendorSpec
from npu_agent.vendors.furiosa import attributes, labels, metrics
from npu_agent.vendors.furiosa.families import FAMILIES

SPEC = VendorSpec(
    families={family.name: family.widths for family in FAMILIES.values()},
    resource_name="beta.furiosa.ai/npu",
    socket_name="furiosa-npu",
    label_sets=labels.SETS,
    label_set="beta",
    metric_schemas=metrics.SCHEMAS,
    metric_schema="0.8",
    dra=attributes.NAMES,
    condition="furiosa.ai/NPUReady",
)
