"""The labels on the Node: their values (`compute`), and the two ways to write them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent.kube import Api
from npu_agent.outputs.labels.node import NodeOutput

if TYPE_CHECKING:
    from npu_agent.outputs.labels.nfd import NfdOutput


def output_of(
    output: str, *, api: Api, node_name: str | None, host_root: Path
) -> NodeOutput | NfdOutput | None:
    """The place that the config's labels.output names; None for none."""
    match output:
        case "api":
            return NodeOutput(api, node_name)
        case "nfd":
            from npu_agent.outputs.labels.nfd import NfdOutput

            return NfdOutput(host_root)
    return None
