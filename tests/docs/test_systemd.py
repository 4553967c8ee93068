"""The systemd units of docs/examples are good ones, where systemd is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from npu_agent.cli import catalogue

UNITS = Path(__file__).parents[2] / "docs/examples/cdi"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="no systemd here: make packages")
def test_systemd_takes_the_units_of_the_cdi_spec(tmp_path: Path) -> None:
    assert ANALYZE
    program = tmp_path / "npu-agent"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    for unit in UNITS.iterdir():
        text = unit.read_text(encoding="utf-8").replace("/usr/local/bin/npu-agent", str(program))
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    units = sorted(str(path) for path in tmp_path.glob("npu-cdi.*"))
    assert len(units) == 2
    result = subprocess.run(
        [ANALYZE, "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in result.stderr.splitlines() if "npu-cdi" in line]
    assert (result.returncode, said) == (0, [])


def test_the_unit_runs_a_command_that_there_is() -> None:
    text = (UNITS / "npu-cdi.service").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    program, *words = line.removeprefix("ExecStart=").split()
    assert program.endswith("/npu-agent")
    catalogue.parse(words)
