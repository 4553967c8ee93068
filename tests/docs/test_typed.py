"""No command of a page is left to its readers to try."""

from __future__ import annotations

import json
import re

import pytest

from npu_agent.vendors.furiosa.labels import SETS

from .pages import ROOT, Page
from .typed import (
    LEFT_OUT,
    ON_THE_NODE,
    PAGES,
    RUNBOOK,
    RUNBOOK_LEFT_OUT,
    TYPED,
    blocks,
    commands,
    runbook_commands,
)


@pytest.mark.parametrize("of", PAGES, ids=lambda one: one.name)
def test_each_command_is_typed_by_a_test_or_left_out_for_a_reason(of: Page) -> None:
    there = {(of.name, heading) for heading, _, _ in blocks(of)}
    listed = {place for place in (*TYPED, *LEFT_OUT) if place[0] == of.name}
    assert there == listed
    assert not TYPED.keys() & LEFT_OUT.keys()
    # None is hidden in a block that is no block of commands.
    everything = [line for _, code in of.blocks for line in code.splitlines()]
    found = "\n".join(code for _, _, code in blocks(of))
    for line in everything:
        if re.match(r"\$ |(kubectl|helm|oc|make|sed|rm) ", line):
            assert line in found, line


def test_the_tests_that_are_named_exist() -> None:
    for name in set(TYPED.values()):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_the_command_that_removes_labels_knows_each_key_of_ours() -> None:
    found = [
        re.search(r"grep -oE '(.*?)'", one)
        for of in PAGES
        for _, *block in blocks(of)
        for one in commands(*block)
    ]
    (pattern,) = {match[1] for match in found if match}
    keys = {key for labels in SETS.values() for key in labels.keys}
    nodes = json.dumps(dict.fromkeys([*keys, "example.com/a", "npu.furiosa.ai/b"], "c"))
    assert {match[0][1:] for match in re.finditer(pattern, nodes)} == keys


@pytest.mark.parametrize("of", RUNBOOK, ids=lambda page: page.name)
def test_each_command_of_the_runbook_is_typed_where_kubectl_is_all_there_is(of: Page) -> None:
    """Set by kubectl, begun with it, or for the shell that docs/alerts.md gets on the node."""
    found = [*runbook_commands(of)]
    assert len(found) > 10
    for command, paragraph in found:
        program = command.split()[0]
        if program in ON_THE_NODE:
            assert "on the node" in " ".join(paragraph.split()).lower(), command
        else:
            assert re.match(r"kubectl |NODE=|\w+=\$\(kubectl ", command), command
        if command.startswith("kubectl npu"):
            others = [other for other, place in found if place == paragraph and other != command]
            assert "install.md#verify" in paragraph or any(" npu " not in one for one in others)


def test_the_commands_of_the_runbook_that_are_not_typed_are_there() -> None:
    there = {command for of in RUNBOOK for command, _ in runbook_commands(of)}
    assert there >= RUNBOOK_LEFT_OUT.keys()
