"""`npu-agent uncordon`: see `npu_agent.commands.cordon`."""

from npu_agent.commands.cordon import main

__all__ = ["main"]
