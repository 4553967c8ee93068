"""A build hook: the commit for `npu-agent version`, and the runbook that the agent serves.

The commit is $REVISION, else what git says of the checkout, else what the source archive has. The
runbook is made of pages of docs/, which a source archive lacks: it has the runbook itself.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STAMP = "npu_agent/commit"
GIT = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


class Made(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling finds it by its base."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Makes the runbook. Adds the commit, but not to an editable install: that asks git."""
        runbook = Path(self.root, "docs/runbook.py")
        if runbook.exists():
            runpy.run_path(str(runbook), run_name="__main__")
        if version == "editable" or Path(self.root, STAMP).exists():
            return
        self._made = tempfile.TemporaryDirectory()
        stamp = Path(self._made.name, "commit")
        stamp.write_text(
            os.environ.get("REVISION") or _described(Path(self.root)), encoding="utf-8"
        )
        build_data["force_include"][str(stamp)] = STAMP


def _described(root: Path) -> str:
    """Empty where it is no checkout, or git is missing."""
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(GIT, cwd=root, check=False, capture_output=True, encoding="utf-8")
    except OSError:
        return ""
    return done.stdout
