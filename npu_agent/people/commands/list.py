"""`npu-agent list`: the vendor's own tool has this name for `npu_agent.people.commands.info`."""

from npu_agent.people.commands.info import main

__all__ = ["main"]
