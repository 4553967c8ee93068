"""The systemd unit: systemd takes it, it gives little away, and the binary lives within it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent import config
from npu_agent.vendors import REGISTRY
from tests.kube.helpers import Authority
from tests.packaging import host as on
from tests.packaging.conftest import PROJECT
from tests.packaging.host import Host
from tests.packaging.test_binary import COMMAND, container

UNIT = PROJECT / "packaging" / "npu-agent.service"
EXPOSURE = 25
"""Of 100, by `systemd-analyze security`; an unrestricted service has 96."""


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze; without it a test is skipped, in CI it fails."""
    if not shutil.which("systemd-analyze"):
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze is missing: apt-get install systemd")
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program in it that is there, as systemd looks for it."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace(COMMAND[0], "/bin/true"))
    return path


def test_systemd_takes_it(unit: Path) -> None:
    verified = analyze("verify", "--man=no", unit)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_it_gives_little_away(unit: Path) -> None:
    seen = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", unit)
    assert seen.returncode == 0, seen.stdout


def test_example_config_is_good_and_where_the_unit_looks_for_it() -> None:
    config.load(PROJECT / "packaging" / "npu-agent.yaml", REGISTRY)
    assert "--config-file=/etc/npu-agent/npu-agent.yaml" in UNIT.read_text()


async def test_the_binary_needs_no_other_system_calls_and_memory(
    binary: Path, host: Host, ca: Authority
) -> None:
    """As in the unit: its filter of system calls, and its /tmp."""
    (temporary,) = re.findall("^TemporaryFileSystem=/tmp:(.*)$", UNIT.read_text(), re.MULTILINE)
    confined = replace(container(binary, temporary), calls=sorted(_allowed()))
    await on.serves(confined, COMMAND, host, ca)


def _allowed() -> set[str]:
    """What the lines SystemCallFilter= come to: the first allows, one with a ~ takes away."""
    allowed: set[str] = set()
    for line in re.findall("^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE):
        names = {call for group in line.removeprefix("~").split() for call in _calls(group)}
        allowed = allowed - names if line.startswith("~") else allowed | names
    return allowed


def _calls(group: str) -> set[str]:
    """The system calls of a group such as @system-service, and of the groups in it."""
    if not group.startswith("@"):
        return {group}
    listed = analyze("syscall-filter", "--no-pager", group).stdout.splitlines()[1:]
    words = [line.strip() for line in listed if line.strip() and not line.strip().startswith("#")]
    return {call for word in words for call in _calls(word)}
