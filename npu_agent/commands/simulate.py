"""`npu-agent simulate`: the command of `npu_agent.simulator`."""

from npu_agent.simulator.command import add_arguments, main

__all__ = ["add_arguments", "main"]
