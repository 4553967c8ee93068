"""`npu-agent version`: the version, and the commit that it was built from."""

from __future__ import annotations

import argparse
import platform
import subprocess
from pathlib import Path

from npu_agent import __version__
from npu_agent.people.commands import view

_PACKAGE = Path(__file__).parents[2]
_GIT = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
_DEADLINE = 5.0


def main(args: argparse.Namespace) -> int:
    commit = commit_of(_PACKAGE)
    if view.is_data(args):
        python = platform.python_version()
        print(view.data({"version": __version__, "commit": commit, "python": python}, args))
    else:
        print(f"npu-agent {__version__} (commit {commit or 'unknown'})")
    return 0


def commit_of(package: Path) -> str | None:
    """Returns the commit from the package or the git checkout; None: unknown."""
    stamp = package / "commit"
    checkout = package.parent

    try:
        if stamp.exists():
            commit = stamp.read_text(encoding="utf-8")
        elif (checkout / ".git").exists():
            commit = subprocess.check_output(
                _GIT, cwd=checkout, stderr=subprocess.DEVNULL, encoding="utf-8", timeout=_DEADLINE
            )
        else:
            return None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit.strip() or None
