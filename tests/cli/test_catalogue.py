"""The help of every command, and what all of them have in common."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_agent import config
from npu_agent.cli import main as cli
from npu_agent.cli.catalogue import GROUPS, all_commands, parse
from npu_agent.vendors import SPEC

COMMANDS = all_commands()


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


@pytest.mark.parametrize("name", ["", *COMMANDS, *GROUPS])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = helped(capsys, *name.split(), "--help")
    assert out.startswith(f"usage: npu-agent {name}".rstrip())
    assert out == helped(capsys, *name.split(), "-h") == helped(capsys, "help", *name.split())
    assert not [line for line in out.splitlines() if len(line) > 79]
    if name not in GROUPS:
        assert "\nExamples:\n  " in out
        assert " --host-root DIR" in out


@pytest.mark.parametrize("name", ["", *GROUPS])
def test_without_a_command_help_lists_them(capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = helped(capsys, *name.split())
    below = {each for each in (*COMMANDS, *GROUPS) if each.rpartition(" ")[0] == name}
    words = {each.rpartition(" ")[2] for each in below}
    assert set(re.findall(r"^    ([a-z]+) ", out, re.MULTILINE)) == words


def test_run_lists_the_whole_configuration_and_labels_none_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, labels = helped(capsys, "run", "--help"), helped(capsys, "labels", "--help")
    for key in config.KEYS:
        assert f" {key.option} " in run
        assert f" {key.option} " not in labels
    assert " --config-file FILE" in labels


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_module_and_its_examples_are_right(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert callable(cli.module_of(name).main)
    _, _, examples = helped(capsys, *name.split(), "--help").partition("\nExamples:\n")
    found = re.findall(r"^  npu-agent (.*?)(?: >.*| +#.*)?$", examples, re.MULTILINE)
    assert found
    for example in found:
        args = parse(example.split())
        assert args.command == name
        if not hasattr(args, "config_file"):
            config.from_args(args, SPEC)


@pytest.mark.parametrize("name", ["info", "allocations", "labels", "doctor", "verify", "version"])
def test_output_is_the_same_option_everywhere(name: str) -> None:
    for option in ("-o", "--output", "--format"):
        for value in ("table", "wide", "json", "yaml"):
            assert parse([name, option, value]).output == value
    assert parse([name]).output == "table"


def test_options_may_stand_between_arguments() -> None:
    words = "simulate /tmp/x --log-level debug fault npu0 --host-root / dead"
    args = parse(words.split())
    assert (args.simulate_action, args.card, args.fault) == ("fault", "npu0", "dead")
    assert parse(["labels", "--labels-output=nfd", "clear"]).action == "clear"
    assert parse(["--log-level=debug", "labels"]).action == "show"


def test_a_value_may_look_like_an_option_of_another_command() -> None:
    assert parse(["--host-root", "info", "info"]).host_root == Path("info")
    assert vars(parse(["run", "--interval", "-1"]))["config.interval"] == "-1"
