"""`npu-agent uncordon`: see `npu_agent.people.commands.cordon`."""

from npu_agent.people.commands.cordon import main

__all__ = ["main"]
