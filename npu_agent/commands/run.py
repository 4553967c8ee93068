"""`npu-agent run`: the agent."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from npu_agent import logs
from npu_agent.commands.common import effective, host_root
from npu_agent.shutdown import Shutdown


def main(args: argparse.Namespace) -> int:
    # The first process of a container has no default for SIGTERM: without this, an agent that is
    # ended while it still imports would be waited for until it is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from npu_agent import agent

    found = effective(args)
    logs.setup(found.config.log.level, found.config.log.format)
    shutdown = Shutdown()
    host = agent.Host(host_root(args), os.environ.get("NODE_NAME") or None, kubelet=args.kubelet)
    file = getattr(args, "config_file", None)
    asyncio.run(agent.run(found, host, config_file=file, shutdown=shutdown))
    return 0
