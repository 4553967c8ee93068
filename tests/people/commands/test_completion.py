"""Completion as a person has it: words are typed into real shells, and Tab is pressed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import ran
from tests.terminal import Terminal, terminal

SHELLS = {
    "bash": (
        ("bash", "--norc", "--noprofile", "-i"),
        "npu-agent() { echo \"RAN<$*>\"; }\nPS1='$ '\n",
    ),
    "zsh": (
        ("zsh", "-f", "-i"),
        "autoload -Uz compinit; compinit -D -u\nnpu-agent() { print \"RAN<$*>\" }\nPS1='$ '\n",
    ),
    "fish": (
        ("fish", "--no-config", "-i"),
        "function npu-agent; echo \"RAN<$argv>\"; end\nfunction fish_prompt; echo '$ '; end\n",
    ),
}
"""How each is started without anybody's settings, and what makes it show what it would run."""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(shell) is None and not os.environ.get("CI"),
        reason=f"no {shell}: make packages",
    )


def script(shell: str) -> str:
    code, out, err = ran("completion", shell)
    assert (code, err) == (0, "")
    return out


@contextmanager
def shell_with_completion(shell: str, directory: Path) -> Iterator[Terminal]:
    command, setup = SHELLS[shell]
    (directory / "completion").write_text(script(shell), encoding="utf-8")
    read = 'eval "$(cat completion)"' if shell == "zsh" else "source completion"
    file = directory / "setup"
    file.write_text(f"{setup}cd {directory}\n{read}\necho READY\n", encoding="utf-8")
    # Without a HOME of its own a shell would read, and write, the history of whoever runs this.
    env = {"HOME": str(directory), "XDG_CONFIG_HOME": str(directory), "ZDOTDIR": str(directory)}
    with terminal(*command, columns=120, env=env) as running:
        running.type(f". {file}\n")
        running.until("READY\r?\n")
        yield running


@pytest.mark.parametrize("shell", [pytest.param(each, marks=needs(each)) for each in SHELLS])
def test_in_a_real_shell(shell: str, tmp_path: Path) -> None:
    (tmp_path / "config-file.yaml").write_text("", encoding="utf-8")
    (tmp_path / "directory").mkdir()
    for name in ("dead", "fau"):  # none of them is meant where a word is
        (tmp_path / name).mkdir()
    with shell_with_completion(shell, tmp_path) as running:
        for typed, ran in (
            ("inf", "info"),
            ("info --wat", "info --watch"),
            ("info -o js", "info -o json"),
            ("info --log-level war", "info --log-level warning"),
            ("run --health-interv", "run --health-interval"),
            (
                f"run --config-file {tmp_path}/config-f",
                f"run --config-file {tmp_path}/config-file.yaml",
            ),
            (f"info --host-root {tmp_path}/dir", f"info --host-root {tmp_path}/directory"),
            (f"config check {tmp_path}/config-f", f"config check {tmp_path}/config-file.yaml"),
            ("run --labels-sets curr", "run --labels-sets current"),
            ("simulate host fau", "simulate host fault"),
            ("simulate host fault npu0 dea", "simulate host fault npu0 dead"),
        ):
            before = len(running.output)
            running.type(f"npu-agent {typed}\t")
            running.type("\n")
            found = running.until(r"RAN<([^>]*)>", before)
            # Some put a slash behind a directory, and take it away when the line ends.
            assert found[1].strip().rstrip("/") == ran
