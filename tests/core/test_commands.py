"""Every command that the page shows is one that its reader can type: on Warboy and on RNGD."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_agent.cli import catalogue
from npu_agent.core.cordon import cordons
from npu_agent.core.hardware import CardState, Cause, SkippedDevice
from npu_agent.core.kinds import TRAITS, NamedCard, Problem
from npu_agent.core.problems import notes, problems
from npu_agent.core.state import ConditionState, Invocation, LabelState, SessionPhase, TlsState
from npu_agent.core.timeline import Timeline
from npu_agent.core.trends import TrendKind
from npu_agent.kubelet.podresources import Holdings
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.wording import Written, of_problem
from npu_agent.wording.commands import device_paths, first
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import Scene, driver, fenced, held, read

FAMILY = pytest.mark.parametrize("family", FAMILIES)
AGENT = Invocation(
    pod="npu-system/npu-agent-x7k2p", config_file="/etc/npu agent/config.yaml", host_root="/host"
)
ON_THE_HOST = Invocation()
HERE = {"kubectl", "dmesg", "lspci", "systemctl"}
"""The programs of commands and of those that remedies name; a host's own are in a remedy alone."""
DEBUG = (
    *("kubectl", "-n", "npu-system", "debug", "node/node-7", "-it", "--profile=sysadmin"),
    "--image=$(kubectl -n npu-system get pod npu-agent-x7k2p -o",
    "jsonpath='{.spec.containers[0].image}')",
    *("--", "chroot", "/host", "sh", "-c"),
)
"""What begins each command for a shell of the node."""


def card(family: str, index: int, **values: Any) -> CardState:
    uuid = values.pop("uuid", f"U{index}")
    return state(family, index, id_=uuid, pci_bus_id=f"0000:0{index}:00.0", **values)


def everything(family: str) -> list[Written]:
    """All problems and notes that there can be, on cards of one family."""
    found: list[Written] = []

    def add(scene: Scene) -> None:
        now = replace(scene, invocation=AGENT).state()
        now = replace(
            now,
            api_error="no connection",
            node_error="no connection",
            auto_pending_reason="no connection",
            cdi_error="disk full",
            cordons={"U1": "fan"},
            cordons_wrong=cordons({}, now.snapshot, "not JSON").wrong,
            condition=ConditionState(type="a/b", error="403"),
            tls=TlsState(error="expired"),
            expected_cards=12,
            recorded={"B": frozenset({"pci:0000:99:00.0"})},
        )
        every = (*problems(now), *notes(now), *problems(replace(now, api_error=None)))
        found.extend(of_problem(problem, now) for problem in every)

    for index, cause in enumerate(Cause):
        sick = fenced(card(family, index), "why", 60, cause)
        pods = Holdings(assignments=(held(sick, "train-0"),))
        for cards in (
            (sick,),
            (sick, card(family, 8)),
            (sick, fenced(card(family, 8), "", 1, cause)),
        ):
            add(Scene(cards=cards))
            add(Scene(cards=cards, holdings=pods))
    for kind in TrendKind:
        add(Scene(cards=(read(card(family, 2)),)).lasts(kind, read(card(family, 2)), 60, "why"))
    for temperature in (95, 101):
        hot = read(card(family, 2), temperature=temperature, load=80)
        add(Scene(cards=(hot, read(card(family, 1)))))
        add(Scene(cards=(hot,), holdings=Holdings(assignments=(held(hot, "train-0"),))))
    left = card(family, 3)
    gone = Timeline().left([left], [], time.monotonic())
    add(Scene(timeline=gone, holdings=Holdings(assignments=(held(left, "train-0"),))))
    other = card(family, 3, uuid="OTHER")
    add(Scene(cards=(other,), holdings=Holdings(assignments=(held(left, "train-0"),))))
    add(Scene(cards=(read(card(family, 1), age=600),), timeline=gone))
    for phase in SessionPhase:
        troubled = Scene(
            cards=(card(family, 1),),
            phase=phase,
            holdings=Holdings(error="no socket"),
            skipped=(SkippedDevice("/sys/x", "Permission denied", unread=True),),
            labels=LabelState(output="api", labels={"a": "b"}, error="403"),
            dra=(driver(phase=phase),),
        )
        troubled.config = replace(troubled.config, errors=("bad",))
        add(troubled)
    return found


@FAMILY
def test_every_command_of_every_problem_is_typed_where_its_reader_is(family: str) -> None:
    every = everything(family)
    commands = {text for note in every for text in (note.command, note.last_command) if text}
    inside = {text for note in every for text in note.remedy.split("`")[1::2]}
    assert {command.split()[0] for command in commands} == {"kubectl"}
    assert {command.split()[0] for command in inside} == HERE
    assert not any("kubectl npu" in line for line in commands | inside), "it may not be installed"
    on_the_node = {line for line in commands if " debug " in line}
    for line in on_the_node:
        begin, _, rest = line.partition(" sh -c ")
        assert f"{begin} sh -c" == " ".join(DEBUG)
        (typed,) = shlex.split(rest)
        enter, _, command = typed.partition("; ")
        assert enter == "read _", "what is printed before kubectl is attached would be lost"
        check(shlex.split(command))
    assert len(on_the_node) > 5
    for line in (commands - on_the_node) | inside:
        for command in line.split(" && "):
            check(shlex.split(command))
    # What is known is filled in.
    filled = {line.replace("{.spec.containers[0].image}", "") for line in commands}
    assert not any(word in line for line in filled for word in ("NODE", "FILE", "POD ", "{"))


def test_on_a_host_without_a_pod_the_agents_own_commands_are_plain() -> None:
    npu0 = (NamedCard("U0", "npu0"),)
    facts = {"nodes": (("npu0", "npu0pe0"),)}
    for kind in TRAITS:
        pods = ("default/a",) if kind in ("DeviceMissing", "CardReplaced") else ()
        away = (Problem("NodeNotWatched"),) if kind == "APIServerAway" else ()
        problem = Problem(kind, npu0, pods, facts, parts=away)
        if command := first(problem, ON_THE_HOST, "node-7"):
            check(shlex.split(command))
            assert "exec" not in command
            assert "debug" not in command
    flapping = Problem("CardFlapping", npu0)
    assert first(flapping, ON_THE_HOST, None) == "", "there is no Node to write to"


def check(words: list[str]) -> None:
    """The words are of a program that would take them."""
    match words:
        case ["kubectl", "-n", "npu-system", "exec", "npu-agent-x7k2p", "--", *rest]:
            assert rest[0] == "npu-agent"
            check(rest)
        case ["kubectl", "annotate", "node", "node-7", "npu-agent/cordoned-"]:
            pass
        case ["kubectl", "cordon", node]:
            assert node == "node-7"
        case ["kubectl", "delete", "pod", "-n", namespace, *pods]:
            assert namespace
            assert pods
        case ["npu-agent", *rest]:
            catalogue.parse(rest)
        case ["fuser", "-v", *paths] | ["ls", "-l", *paths]:
            assert paths
            assert all(path.startswith("/dev/") for path in paths)
        case ["lspci"] | ["lspci", "-vv"] | ["lspci", "-s", _] | ["dmesg"]:
            pass
        case ["dmesg", "|", "tail", "-n", "50"] | ["systemctl", "status", "kubelet"]:
            pass
        case _:
            raise AssertionError(f"nobody knows what this does: {words}")


@FAMILY
def test_the_paths_of_a_card_are_its_own_nodes_and_no_others(tmp_path: Path, family: str) -> None:
    cards = {index: FAMILIES[family].card(index, product=family) for index in (2, 3, 20)}
    for each in cards.values():
        for node in each.access.nodes():
            (tmp_path / node).parent.mkdir(exist_ok=True)
            (tmp_path / node).touch()
    for named in ((2,), (2, 3), (20,)):
        wanted = [cards[index] for index in named]
        words = shlex.split(device_paths(card.access.nodes() for card in wanted))
        found = {
            str(path.relative_to(tmp_path))
            for word in words
            for path in tmp_path.glob(word.removeprefix("/dev/"))
        }
        assert found == {node for each in wanted for node in each.access.nodes()}
        assert len(words) <= 2 * len(named), "a person reads it"
