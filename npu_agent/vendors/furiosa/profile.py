"""Signs of this vendor's cards outside its driver."""

from __future__ import annotations

from npu_agent.core.vendor import Driver, Profile
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.family import CDI_KIND, ENVIRONMENT

PROFILE = Profile(
    title="FuriosaAI",
    pci="1ed2",
    plugins="furiosa",
    drivers=tuple(
        Driver(family=one.name, title=one.title, directory=f"sys/class/{one.class_dir}")
        for one in FAMILIES.values()
    ),
    environment=ENVIRONMENT,
    cdi_kinds=(CDI_KIND,),
)
