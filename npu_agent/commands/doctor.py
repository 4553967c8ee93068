"""`npu-agent doctor`: runs the checks, and shows what they found."""

from __future__ import annotations

import argparse
import asyncio
import sys

from npu_agent import logs
from npu_agent.commands import FAILED, view
from npu_agent.commands.common import host_root, vendors
from npu_agent.doctor import report
from npu_agent.doctor.examine import examine
from npu_agent.doctor.situation import Situation, configuration, forgotten
from npu_agent.vendors import WORDS


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is wrong."""
    wanted, good = configuration(args, WORDS)
    # The file's level is the agent's: here it would mix the probes' own log with the lines.
    asked = "config.log.level" in args
    logs.setup(wanted.log.level if asked else "error", wanted.log.format)
    situation = Situation.here(wanted, host_root(args), vendors(args))

    async def act() -> int:
        checks = (forgotten(args, situation, good), *await examine(situation))
        # Shown here: what hangs after all, such as a name that is resolved, may delay the end.
        if args.output in view.DATA:
            print(view.data([check.as_json() for check in checks], args.output))
        else:
            view.show(report.table(checks, narrow=sys.stdout.isatty()), report.summary(checks))
        sys.stdout.flush()
        return FAILED if report.failed(checks) else 0

    return asyncio.run(act())
