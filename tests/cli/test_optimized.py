"""python -OO, which has no docstrings and no assertions, runs what python runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from npu_agent.cli.catalogue import all_commands
from tests.processes import DEADLINE, environment, started

PRINTED = """
import sys
from npu_agent.cli.main import main

for words in sys.argv[1:]:
    print(words)
    try:
        main(words.split())
    except SystemExit as end:
        assert end.code == 0
"""


def printed(*commands: str, optimize: str = "", name: str = "npu-agent") -> str:
    """What these commands print one after another, called as `name`."""
    program = f"import sys; sys.argv[0] = {name!r}\n{PRINTED}"
    done = subprocess.run(
        [sys.executable, "-c", program, *commands],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment({"PYTHONOPTIMIZE": optimize}),
        check=True,
    )
    return done.stdout


def test_every_command_has_the_same_help_and_the_config_the_same_schema() -> None:
    commands = (
        *(f"{name} --help" for name in ("", *all_commands())),
        "config schema",
        "config show",
    )
    assert printed(*commands, optimize="2") == printed(*commands)


def test_kubectl_npu_has_the_same_help() -> None:
    commands = ("--help", "why --help")
    called = "kubectl-npu"
    assert printed(*commands, optimize="2", name=called) == printed(*commands, name=called)


def test_the_agent_runs(tmp_path: Path) -> None:
    words = ("--simulate=warboy=1", "--host-root", tmp_path, "--labels-output=none")
    ports = ("--metrics-listen=127.0.0.1:0", "--metrics-probes=127.0.0.1:0")
    plugins = f"--plugin-dir={tmp_path / 'plugins'}"
    with started("run", *words, *ports, plugins, python=("-OO",)) as agent:
        agent.said("card=npu0")
        code, _, log = agent.end()
    assert (code, "Traceback" in log) == (0, False)
