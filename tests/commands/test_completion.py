"""Completion as a person has it: words are typed into real shells, and Tab is pressed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npu_agent.commands import completion
from npu_agent.commands.catalogue import COMMANDS
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


@contextmanager
def shell_with_completion(shell: str, directory: Path) -> Iterator[Terminal]:
    command, setup = SHELLS[shell]
    file = directory / "setup"
    file.write_text(f"{setup}{os.linesep.join(completion.script(shell))}\necho READY\n")
    # Without a HOME of its own a shell would read, and write, the history of whoever runs this.
    env = {"HOME": str(directory), "XDG_CONFIG_HOME": str(directory), "ZDOTDIR": str(directory)}
    with terminal(*command, columns=120, env=env) as running:
        running.type(f". {file}\n")
        running.until("READY\r?\n")
        yield running


@pytest.mark.parametrize("shell", [pytest.param(each, marks=needs(each)) for each in SHELLS])
def test_in_a_real_shell(shell: str, tmp_path: Path) -> None:
    (tmp_path / "config-file.yaml").write_text("")
    (tmp_path / "directory").mkdir()
    with shell_with_completion(shell, tmp_path) as running:
        for typed, ran in (
            ("inf", "info"),
            ("config che", "config check"),
            ("info --wat", "info --watch"),
            ("info -o js", "info -o json"),
            ("labels cle", "labels clear"),
            ("completion fi", "completion fish"),
            ("info --log-level war", "info --log-level warning"),
            ("--log-format=js", "--log-format=json"),
            ("run --health-interv", "run --health-interval"),
            (
                f"run --config-file {tmp_path}/config-f",
                f"run --config-file {tmp_path}/config-file.yaml",
            ),
            (f"info --host-root {tmp_path}/dir", f"info --host-root {tmp_path}/directory"),
            (f"config check {tmp_path}/config-f", f"config check {tmp_path}/config-file.yaml"),
            ("config sch", "config schema"),
            # The value of an option is no command, though it is the name of one.
            ("--log-level info conf", "--log-level info config"),
            ("--log-level info config che", "--log-level info config check"),
            ("--host-root config inf", "--host-root config info"),
        ):
            before = len(running.output)
            running.type(f"npu-agent {typed}\t")
            running.type("\n")
            found = running.until(r"RAN<([^>]*)>", before)
            # Some put a slash behind a directory, and take it away when the line ends.
            assert found[1].strip().rstrip("/") == ran


@pytest.mark.parametrize("shell", [pytest.param(each, marks=needs(each)) for each in SHELLS])
def test_the_script_is_one_that_the_shell_takes(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text("\n".join(completion.script(shell)))
    subprocess.run([shell, "-n", str(file)], check=True, timeout=30)


@needs("bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("info", "--output", "="), "table wide json yaml"),  # as bash takes --output= apart
        (("config", ""), "check show schema"),
        (("run", "--interval", ""), ""),
        (("verify", "--e"), "--expect"),
        (("info", "--inter"), ""),
        (("--log-level", "info", "config", ""), "check show schema"),
        (("--log-level", "=", "info", "config", ""), "check show schema"),
        (("--log-level", "info", "verify", "--e"), "--expect"),
        (("--log-level", ""), "debug error info warning"),
    ],
)
def test_what_bash_offers(words: tuple[str, ...], offered: str) -> None:
    assert offers(*words) == offered


@needs("bash")
def test_bash_offers_the_commands_behind_a_value_that_is_called_like_one() -> None:
    assert offers("--log-level", "info", "") == offers("") != ""
    assert offers("--log-level", "=", "info", "") == offers("")


def offers(*words: str) -> str:
    """What bash offers for the last of these words."""
    lines = "\n".join(completion.script("bash"))
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _npu_agent; echo "${COMPREPLY[*]}"'
    command = ("bash", "--norc", "-c", f"{lines}\n{ask}", "bash", "npu-agent", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return done.stdout.removesuffix("\n")


def test_every_command_and_option_is_known() -> None:
    known = {place.name: place for place in completion.places()}
    for name, command in COMMANDS.items():
        options = {each for option in known[name].options for each in option.names}
        assert options == set(command.parser().options)
    text = "\n".join(completion.script("bash"))
    words = set(re.findall(r"[\w-]+", text))
    assert {word for name in COMMANDS for word in name.split()} <= words


def test_an_option_means_the_same_everywhere() -> None:
    """The scripts do not ask which command it belongs to."""
    seen: dict[str, completion.Value | None] = {}
    for place in completion.places():
        for option in place.options:
            for name in option.names:
                assert seen.setdefault(name, option.value) == option.value
