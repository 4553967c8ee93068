"""This vendor's names in config files, labels and metrics, and signs of its cards on a host."""

from __future__ import annotations

from npu_agent.core.hardware import CoreRange
from npu_agent.core.vendor import KernelDriver, Profile, VendorSpec
from npu_agent.vendors.furiosa import labels, metrics
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.family import CDI_KIND, ENVIRONMENT

SPEC = VendorSpec(
    families={family.name: family.widths for family in FAMILIES.values()},
    resource_name="beta.furiosa.ai/npu",
    socket_name="furiosa-npu",
    label_sets=labels.SETS,
    label_set="beta",
    metric_schemas=metrics.SCHEMAS,
    metric_schema="0.8",
    nodes=tuple(sorted({family.dev_dir or "npu" for family in FAMILIES.values()})),
    condition="furiosa.ai/NPUReady",
)
"""Its defaults are the product's."""

_IDENTITIES = ("device_sn", "device_uuid", "soc_id", "soc_uid")

PROFILE = Profile(
    title="FuriosaAI",
    pci="1ed2",
    plugins="furiosa",
    drivers=tuple(
        KernelDriver(
            family=family.name, title=family.title, directory=f"sys/class/{family.class_dir}"
        )
        for family in FAMILIES.values()
    ),
    nodes=tuple(f"{family.dev_dir}npu*" for family in FAMILIES.values()),
    identities=_IDENTITIES,
    files=(
        *_IDENTITIES,
        *("platform_type", "device_type", "soc_rev", "busname", "dev", "version", "fw_version"),
        *("heartbeat", "atr_error", "hw_error", "throttle_reason"),
        *("ne_clk_freq_info", "npu_clocks", "npu_freq_limit_hz", "npu_slowdown_temperature_mc"),
        *("power_limit_mw", "power_limit_default_mw"),
        *("temp*_input", "power*_average", "in*_input", "curr*_input"),
        *("temp*_label", "power*_label", "in*_label", "curr*_label"),
        *(file for family in FAMILIES.values() for file in family.files),
    ),
    environment=ENVIRONMENT,
    whole_environment=tuple(
        (name, form, CoreRange(0, family.core_count - 1))
        for family in FAMILIES.values()
        for name, form in family.whole_environment
    ),
    cdi_kind=CDI_KIND,
    # "RNGD driver relies on these syscalls": the vendor's page on containers, SDK 2026.3.
    io_uring=("rngd",),
    # The vendor's page "Host PCI Optimization Tuning".
    huge_pages=65_536,
    host_nodes=(
        ("dma_heap/system", "programs made with furiosa-opt take all host memory from it"),
    ),
)
