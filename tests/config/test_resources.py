from __future__ import annotations

from typing import Literal

import pytest

from npu_agent.config import Config
from npu_agent.config.resources import offered_by, resources_of
from npu_agent.config.schema import AllocationConfig, NodeApi, ResourceSpec
from npu_agent.core.offer import Resource

FAMILIES = ("rngd", "warboy")
Api = Literal["device-plugin", "dra", "auto"]


def config(api: Api, rngd: Api | None = None) -> Config:
    """For all nodes, and for one family of them; the node n1 has its own."""
    return Config(
        allocation=AllocationConfig(api=api, nodes=(NodeApi(node_name="n1", api="dra"),)),
        resources=(ResourceSpec(name="a.b/c", family="rngd", api=rngd),),
    )


@pytest.mark.parametrize(
    ("configured", "node", "auto", "plugin", "dra"),
    [
        (config("device-plugin"), "n2", False, "rngd warboy", ""),
        (config("device-plugin"), None, None, "rngd warboy", ""),
        (config("device-plugin"), "n1", False, "", "rngd warboy"),
        (config("device-plugin", "dra"), "n2", False, "warboy", "rngd"),
        (config("dra", "device-plugin"), "n1", False, "rngd", "warboy"),
        (config("auto"), "n2", True, "", "rngd warboy"),
        (config("auto"), "n2", False, "rngd warboy", ""),
        (config("auto", "device-plugin"), "n2", None, "rngd", ""),
        (config("auto"), "n1", None, "", "rngd warboy"),
    ],
)
def test_a_family_is_offered_by_one_api(
    configured: Config, node: str | None, auto: bool | None, plugin: str, dra: str
) -> None:
    assert offered_by(configured, FAMILIES, "device-plugin", node, auto=auto) == {*plugin.split()}
    assert offered_by(configured, FAMILIES, "dra", node, auto=auto) == {*dra.split()}


def resources(
    pe: Literal["Fusion", "Single"], name: str = "", cores: int | None = None
) -> tuple[Resource, ...]:
    """With a resource of the family rngd, if it has a name."""
    spec = ResourceSpec(name=name, family="rngd", cores_per_device=cores)
    wanted = Config(resource_name="d/npu", default_pe=pe, resources=(spec,) if name else ())
    return resources_of(wanted, {"warboy": 2, "rngd": 8})


def test_default_resource_serves_every_family_and_an_override_takes_its_own_out() -> None:
    assert resources("Fusion") == (Resource(name="d/npu", widths=(("warboy", 2), ("rngd", 8))),)
    assert resources("Single", "r/npu", 4) == (
        Resource(name="r/npu", widths=(("rngd", 4),)),
        Resource(name="d/npu", widths=(("warboy", 1),)),
    )
    # An override without a width is as wide as the default says.
    assert resources("Single", "r/npu")[0].widths == (("rngd", 1),)
    assert resources("Fusion", "r/npu")[0].widths == (("rngd", 8),)


def test_override_may_share_the_name_of_the_default() -> None:
    assert resources("Fusion", "d/npu", 4) == (
        Resource(name="d/npu", widths=(("rngd", 4), ("warboy", 2))),
    )
