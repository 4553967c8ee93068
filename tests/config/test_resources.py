from __future__ import annotations

from typing import Literal

import pytest

from npu_agent.config import AllocationConfig, Config, ResourceSpec
from npu_agent.config.resources import offered_by
from npu_agent.config.schema import NodeApi

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
