"""docs/dev/add-a-family.md works as it is written: its family finds and offers its cards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from npu_agent.core import offer as advertise
from npu_agent.files import SIMULATION
from npu_agent.people.cards import read_once
from npu_agent.vendors.furiosa import families
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.family import Family
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.outputs.deviceplugin.helpers import devnames

from .pages import ROOT, page

PAGE = page("docs/dev/add-a-family.md")


@pytest.fixture
def family() -> Family:
    [code] = [code for language, code in PAGE.blocks if language == "python"]
    names = dict(vars(families))
    exec(compile(code, "docs/dev/add-a-family.md", "exec"), names)
    found = names["WREN"]
    assert isinstance(found, Family)
    return found


def test_a_card_of_it_is_found_and_offered(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tmp_path / "sys/class/wren_mgmt/npu0_mgmt"
    entry.mkdir(parents=True)
    for name, text in {
        "platform_type": "FuriosaAI",
        "device_type": "Wren",
        "device_uuid": "0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C00",
        "alive": "1",
        "ne_clk_freq_info": "ne tensor (MHz): 2000\n",
    }.items():
        (entry / name).write_text(text, encoding="utf-8")
    (tmp_path / SIMULATION).mkdir()  # plain files stand for device nodes
    (tmp_path / "dev/wren").mkdir(parents=True)
    for node in family.nodes(0):
        (tmp_path / "dev" / node).touch()

    snapshot = asyncio.run(read_once(Furiosa(tmp_path, {"wren": family})))
    [state] = snapshot.cards
    assert state.health.reason == "works"
    assert state.reading
    assert [core.frequency for core in state.reading.cores] == [2000] * 4

    monkeypatch.setitem(FAMILIES, "wren", family)
    whole = advertise.Resource(name="d/npu", widths=(("wren", 4),))
    [device] = advertise.advertise(snapshot, whole)
    assert (device.healthy, devnames(device)) == (True, ("npu0pe0-3",))
    assert set(device.nodes) == set(family.nodes(0))
    halves = advertise.Resource(name="d/npu", widths=(("wren", 2),))
    assert [device.name for device in advertise.advertise(snapshot, halves)] == [
        "npu0pe0-1",
        "npu0pe2-3",
    ]


def test_the_edits_fit_the_files() -> None:
    """Each line that a diff takes away or leaves is there, in this order."""
    files = (
        "npu_agent/vendors/furiosa/families.py",
        "npu_agent/people/simulator/families.py",
        "npu_agent/people/simulator/driver.py",
    )
    diffs = [code for language, code in PAGE.blocks if language == "diff"]
    for diff, path in zip(diffs, files, strict=True):
        at, text = 0, (ROOT / path).read_text(encoding="utf-8")
        for line in diff.splitlines():
            if line.startswith((" ", "-")):
                at = text.find(line[1:] + "\n", at)
                assert at >= 0, f"{path}: {line}"
