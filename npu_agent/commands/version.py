"""`npu-agent version`: the version."""

from __future__ import annotations

import argparse
import platform

from npu_agent import __version__
from npu_agent.commands import view


def main(args: argparse.Namespace) -> int:
    if view.is_data(args):
        found = {"version": __version__, "python": platform.python_version()}
        print(view.data(found, args))
    else:
        print(f"npu-agent {__version__}")
    return 0
