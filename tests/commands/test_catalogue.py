"""The help of every command, and what all of them have in common."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from npu_agent import cli, config
from npu_agent.commands.catalogue import COMMANDS, GROUPS, below, top
from npu_agent.commands.parser import Parser
from npu_agent.config.schema import keys_of, schema_of
from npu_agent.vendors import WORDS
from tests.outputs.deviceplugin.helpers import golden

NAMES = ("", *COMMANDS, *GROUPS)
CONFIGURED = {f"config.{key.name}" for key in keys_of(schema_of(WORDS))}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_help_as_it_was_when_somebody_last_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    """But that of `run`, which is the configuration's reference. UPDATE_GOLDEN=1 rewrites it."""
    pages = [
        f"$ npu-agent {name} --help\n{helped(capsys, *name.split(), '--help')}"
        for name in NAMES
        if name != "run"
    ]
    found = "\n\n".join(pages)
    assert found == golden(Path(__file__).parent / "help.txt", found)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for option in ("--help", "-h", "--help-all"):
        out = helped(capsys, *name.split(), option)
        assert out.startswith(f"usage: npu-agent {name}".rstrip())
        assert max(map(len, out.splitlines())) <= 79 or name in ("simulate", "run", "completion")
    if name not in GROUPS:
        assert "\nexamples:\n  " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_only_the_options_of_the_command(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    short, full = (helped(capsys, *name.split(), each) for each in ("--help", "--help-all"))
    for option, action in COMMANDS[name].parser().options.items():
        assert f" {option}" in full
        common = action.dest in ("host_root", "config.log.level", "config.log.format")
        configured = action.dest in CONFIGURED or action.dest == "config_file"
        shown = f"  {option}" in short or f", {option}" in short.partition("With any")[0]
        assert shown == (name == "run" or not (common or configured)) or option == "--host-root"
    # One line on the common ones.
    (line,) = (line for line in short.splitlines() if line.startswith("With any command: "))
    assert "--host-root" in line


def test_the_top_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = helped(capsys, "--help")
    for name in below(""):
        assert f"\n    {name} " in out
    out = helped(capsys, "config", "--help")
    for name in below("config"):
        assert f"\n    {name} " in out


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_has_a_module_and_its_examples_are_right(command: object) -> None:
    assert isinstance(command, type(COMMANDS["run"]))
    assert callable(importlib.import_module(command.module).main)
    assert command.examples
    for example, _ in command.examples:
        args = cli.parse(example.partition(" >")[0].split())
        assert args.command == command.name
        if not hasattr(args, "config_file"):
            config.from_args(args, WORDS)


def test_output_is_the_same_option_everywhere() -> None:
    have = [name for name, one in COMMANDS.items() if "--output" in one.parser().options]
    assert have == ["info", "allocations", "labels", "doctor", "verify", "version"]
    for name in have:
        for option in ("-o", "--output", "--format"):
            for value in ("table", "wide", "json", "yaml"):
                assert cli.parse([name, option, value]).output == value
        assert cli.parse([name]).output == "table"
    assert cli.parse(["verify", "--format=text"]).output == "text"  # its former name


def test_options_may_stand_between_arguments() -> None:
    words = "simulate /tmp/x --log-level debug fault npu0 --host-root / dead"
    args = cli.parse(words.split())
    assert (args.simulate_action, args.card, args.fault) == ("fault", "npu0", "dead")
    assert cli.parse(["labels", "--labels-output=nfd", "clear"]).action == "clear"
    assert cli.parse(["--log-level=debug", "labels"]).action == "show"


def test_a_value_may_look_like_an_option_of_another_command() -> None:
    assert cli.parse(["--host-root", "info", "info"]).host_root == Path("info")
    assert vars(cli.parse(["run", "--interval", "-1"]))["config.interval"] == "-1"


def test_every_action_of_a_parser_is_in_its_help() -> None:
    """Nothing is added behind the back of what help and completion show."""
    for parser in (top(), *(command.parser() for command in COMMANDS.values())):
        assert isinstance(parser, Parser)
        noted = [action for section in parser.sections for action in section.actions]
        assert noted
        known = argparse.Namespace()
        for action in noted:
            setattr(known, action.dest, None)
        usage = argparse.ArgumentParser.format_help(parser)
        for option in parser.options:
            assert option in usage
