"""Signs of this vendor's cards outside its driver."""

from __future__ import annotations

from npu_agent.core.vendor import KernelDriver, Profile
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.family import CDI_KIND, ENVIRONMENT

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
    nodes=tuple(f"{one.dev_dir}npu*" for one in FAMILIES.values()),
    identities=("device_sn", "device_uuid", "soc_id", "soc_uid"),
    environment=ENVIRONMENT,
    cdi_kinds=(CDI_KIND,),
)
