"""What make answers where it cannot go on: one line with the remedy."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import DEADLINE

ROOT = Path(__file__).parents[1]
_OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
ENVIRON = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
"""Without what the make that runs the tests passes on."""


def make(*arguments: str, cwd: Path = ROOT) -> tuple[int, str]:
    """The exit code, and what it prints but for make's own line at the end."""
    done = subprocess.run(
        ["make", "--file", ROOT / "Makefile", *arguments],
        cwd=cwd,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    *lines, last = done.stderr.splitlines()
    assert last.startswith("make: *** ")
    return done.returncode, done.stdout + "\n".join(lines)


def test_an_unknown_target() -> None:
    said = "npu-agent: there is nothing that makes tets: `make help` lists the targets"
    assert make("tets") == (2, said)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", "needs Python >= 3.11, and {} is older or missing: make PYTHON=python3.12 ..."),
        (
            'case "$2" in *ensurepip*) exit 1; esac',
            "needs the venv module, which {} lacks: apt install python3-venv",
        ),
        (None, "needs Python >= 3.11, and {} is older or missing: make PYTHON=python3.12 ..."),
    ],
)
def test_a_python_that_does_not_do(tmp_path: Path, script: str | None, words: str) -> None:
    python = tmp_path / "python3"
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
    assert make("python", f"PYTHON={python}") == (2, f"npu-agent {words.format(python)}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    code, said = make("python", cwd=tmp_path)
    assert (code, said.partition(": ")[2]) == (2, "clone it to where you can")


def test_check_asks_git_before_it_makes_an_environment(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    done = subprocess.run(
        ["make", "--file", ROOT / "Makefile", "check", "FILE="],
        cwd=tmp_path,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    said = "make check: nothing differs from the last commit: FILE=... names a file\n"
    assert done.stdout == said
    assert [path.name for path in tmp_path.iterdir()] == [".git"]
