"""`npu-agent cdi generate`: what is in the spec, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_agent.cli.main import main
from npu_agent.core.hardware import HealthState
from npu_agent.people import simulator
from npu_agent.people.commands.cdi import host_spec
from tests.inventory.helpers import tree
from tests.outputs.deviceplugin.helpers import snapshot, state

SPEC = Path("etc", "cdi", "furiosa.ai-npu.json")
GENERATE = ("cdi", "generate", "--host-root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a Warboy and an RNGD."""
    return tree(tmp_path / "host", "warboy=1,rngd=1")


def named(root: Path) -> set[str]:
    return {
        device["name"]
        for device in json.loads((root / SPEC).read_text(encoding="utf-8"))["devices"]
    }


A, B = state("warboy", 0, id_="A"), state("warboy", 1, id_="B")


def devices(found: bytes | None) -> dict[str, Any]:
    return {one["name"]: one["containerEdits"] for one in json.loads(found or b"")["devices"]}


def test_a_card_goes_by_its_id_its_number_and_its_cores() -> None:
    spec = host_spec(snapshot(A, state("rngd", 1, id_="B")))
    found = devices(spec.content)
    assert {"A", "npu0", "npu0:0-1", "npu0:0", "npu0:1"} <= found.keys()
    assert {"B", "npu1", "npu1:0-3", "npu1:4-7", "npu1:0-1", "npu1:7"} <= found.keys()
    assert found["A"] == found["npu0"]
    assert found["npu0:1"]["env"] == ["NPU_DEVNAME=npu0pe1", "FURIOSA_DEVICES=npu:0:1"]
    nodes = [node["path"] for node in found["npu0:1"]["deviceNodes"]]
    assert "/dev/npu0pe1" in nodes
    assert "/dev/npu0pe0" not in nodes
    assert spec.devices[0] == "furiosa.ai/npu=A"
    assert spec.left_out == ()


def test_all_is_the_union_of_the_cards() -> None:
    spec = host_spec(snapshot(A, B))
    found = devices(spec.content)["all"]
    assert "FURIOSA_DEVICES=npu:0:0-1,npu:1:0-1" in found["env"]
    nodes = [node["path"] for node in found["deviceNodes"]]
    assert {"/dev/npu0", "/dev/npu1"} <= set(nodes)
    assert len(nodes) == len(set(nodes))


def test_an_unhealthy_card_is_left_out_with_the_reason() -> None:
    ill = state("warboy", 0, id_="A", health=HealthState.UNHEALTHY, reason="it is so")
    spec = host_spec(snapshot(ill, B))
    found = devices(spec.content)
    assert found["all"] == found["B"]
    assert not {"A", "npu0", "npu0:0"} & found.keys()
    assert spec.left_out == ("npu0: unhealthy: it is so",)


def test_a_number_that_two_cards_have_names_neither() -> None:
    spec = host_spec(snapshot(A, state("rngd", 0, id_="B")))
    found = devices(spec.content)
    assert found.keys() == {"A", "B", "all"}
    assert spec.left_out[0] == "the name npu0: several cards have it; use A"


def test_cores_without_a_node_are_left_out_and_the_others_stay() -> None:
    card = state("warboy", 0, missing=("pe1",))
    found = devices(host_spec(snapshot(card)).content)
    assert "npu0:1" not in found
    assert {"npu0:0", "npu0"} <= found.keys()


def test_no_card_no_file() -> None:
    assert host_spec(snapshot()).content is None


def test_generate_writes_the_spec_and_lists_the_names(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GENERATE, str(root)]) == 0
    written, *names, more = capsys.readouterr().out.splitlines()
    assert written == f"{root / SPEC} written"
    cards = {name for name in named(root) if ":" not in name}
    assert {line.removeprefix("furiosa.ai/npu=") for line in names} == cards
    assert more == f"and {len(named(root) - cards)} parts of cards, which --all lists"
    assert main([*GENERATE, str(root), "--all"]) == 0
    _, *names = capsys.readouterr().out.splitlines()
    assert {line.removeprefix("furiosa.ai/npu=") for line in names} == named(root)


def test_generate_can_print_instead(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, str(root), "--stdout"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["kind"] == "furiosa.ai/npu"
    assert printed.startswith('{\n  "cdiVersion"'), "indented, for people"
    assert not (root / SPEC).exists()


def test_generate_fails_clearly(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GENERATE, str(tmp_path)]) == 1
    assert "no NPU to offer" in capsys.readouterr().err
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "cdi").write_text("in the way", encoding="utf-8")
    assert main([*GENERATE, str(root)]) == 1
    error = capsys.readouterr().err
    assert str(root / "etc" / "cdi") in error
    assert "or print the spec by --stdout" in error


def test_generate_removes_a_spec_that_has_no_card_any_more(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GENERATE, str(root)]) == 0
    for name in ("npu0", "npu1"):
        simulator.apply_fault(root, name, "dead")
    assert main([*GENERATE, str(root)]) == 1
    assert not (root / SPEC).exists()
    assert "removed: there is no NPU to offer" in capsys.readouterr().out
