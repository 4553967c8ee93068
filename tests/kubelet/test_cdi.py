"""CDI specs: nothing in them that a runtime would refuse.

For the device plugin they have what is offered, and what is held.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.offer import Device
from npu_agent.kubelet.cdi import PluginSpecs, SpecDirectory, plugin_spec, recovered
from tests.outputs.deviceplugin.helpers import devices as devices_of
from tests.outputs.deviceplugin.helpers import state

KIND = "furiosa.ai/npu"


def devices(id_: str = "A", index: int = 0) -> tuple[Device, ...]:
    """The two cores of a card."""
    return devices_of(state(index=index, id_=id_), cores=1)


def spec_of(
    devices: Iterable[Device], before: bytes | None = None, held: Collection[str] | None = ()
) -> bytes:
    return plugin_spec(KIND, devices, before, held) or b""


def test_a_spec_has_the_nodes_of_each_device() -> None:
    spec = json.loads(spec_of(devices()))
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", KIND)
    assert [device["name"] for device in spec["devices"]] == ["A_cores_0", "A_cores_1"]
    nodes = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert {"path": "/dev/npu0pe0", "hostPath": "/dev/npu0pe0", "permissions": "rw"} in nodes
    assert not any(node["path"] == "/dev/npu0pe1" for node in nodes)


def test_only_the_device_that_a_runtime_would_refuse_is_left_out() -> None:
    good, other = devices()
    for bad in (replace(other, nodes=()), replace(other, id="a b"), replace(other, id="_x")):
        spec = json.loads(spec_of((good, bad)))
        assert [device["name"] for device in spec["devices"]] == [good.id]
    assert plugin_spec(KIND, [replace(good, nodes=())]) is None
    assert plugin_spec(KIND, []) is None


def test_a_held_device_stays_as_it_was_until_it_is_offered_again() -> None:
    one, other = devices("A")
    (third, _) = devices("B", 1)
    before = spec_of((one, other, third))
    assert spec_of((one, other, third), before, held=("A_cores_1", "unknown")) == before
    kept = spec_of((one,), before, held=(other.id, third.id))
    assert kept == before
    assert spec_of((one,), kept, held=(third.id,)) == spec_of((one, third))
    assert plugin_spec(KIND, (), before) is None
    assert spec_of((), before, held=None) == spec_of((one, other), before, held=None) == before
    moved = devices("A", 2)[1]
    assert spec_of((one, moved), before, held=(moved.id,)) == spec_of((one, moved))


def test_a_simulated_card_has_null_in_place_of_its_nodes_and_is_taken_over() -> None:
    simulated = [replace(one, card=replace(one.card, simulated=True)) for one in devices()]
    written = spec_of(simulated)
    edits = [one["containerEdits"]["deviceNodes"] for one in json.loads(written)["devices"]]
    assert {node["path"] for nodes in edits for node in nodes} >= {"/dev/npu0pe0", "/dev/npu0pe1"}
    assert {node["hostPath"] for nodes in edits for node in nodes} == {"/dev/null"}
    assert recovered(KIND, written) == written


def test_only_devices_as_we_write_them_are_taken_over_from_disk() -> None:
    written = spec_of(devices())
    assert recovered(KIND, written) == written
    spec = json.loads(written)
    one, other = spec["devices"]
    edits = one["containerEdits"]
    hook = {"hookName": "prestart", "path": "/tmp/evil"}
    node = {"path": "/dev/npu0", "hostPath": "/dev/sda", "permissions": "rw"}
    others: tuple[Any, ...] = (
        {**one, "containerEdits": {**edits, "hooks": [hook]}},
        {**one, "containerEdits": {"deviceNodes": [node]}},
        {**one, "containerEdits": {"deviceNodes": []}},
        {**one, "containerEdits": {"env": ["A=B"]}},
        {**one, "name": "a b"},
        {**one, "name": 1},
        {**one, "containerEdits": {"deviceNodes": [{"path": 1}]}},
        "noise",
        None,
        other,  # twice: a runtime refuses the whole file for that
    )
    found = {**spec, "containerEdits": {"hooks": [hook]}, "devices": [*others, other]}
    assert json.loads(recovered(KIND, json.dumps(found).encode())) == {**spec, "devices": [other]}


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"devices":' + b"[" * 100_000])
def test_noise_on_disk_has_no_devices(content: bytes) -> None:
    assert json.loads(recovered(KIND, content)) == {
        "cdiVersion": "0.5.0",
        "kind": KIND,
        "devices": [],
    }


SPECS = {"a.json": b"a", "b.json": b"b"}


async def written(path: Path) -> SpecDirectory:
    directory = SpecDirectory(path)
    for _ in range(2):
        await directory.sync(SPECS)
    return directory


def on_disk(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"noise")])
async def test_a_spec_that_another_program_removes_or_changes_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    directory = await written(tmp_path)
    harm(tmp_path / "a.json")
    for _ in range(2):
        await directory.sync(SPECS)
    assert on_disk(tmp_path) == SPECS
    assert [record.message for record in caplog.records] == [
        "a CDI spec was missing or changed; written again"
    ]


@pytest.mark.parametrize(
    ("harm", "stays"),
    [
        (Path.unlink, False),
        (lambda path: (path.unlink(), path.mkdir()), False),
        (lambda _: None, True),
    ],
)
async def test_a_spec_that_is_gone_and_cannot_be_written_is_known_to_be_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], object],
    stays: bool,
) -> None:
    directory = await written(tmp_path)
    harm(tmp_path / "a.json")
    monkeypatch.setattr(files, "replace", AsyncMock(side_effect=OSError(errno.EIO, "I/O error")))
    await directory.sync(SPECS)
    assert ("a.json" in directory.files) == stays
    if stays:  # so does one that cannot be read
        monkeypatch.setattr(files, "read", AsyncMock(side_effect=OSError(errno.EIO, "I/O error")))
        await directory.sync(SPECS)
        assert directory.files == SPECS


async def test_where_no_spec_can_be_written_the_last_good_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = await written(tmp_path)
    (tmp_path / "b.json").write_bytes(b"noise")
    full = AsyncMock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        patched.setattr(files, "replace", full)
        for _ in range(2):
            await directory.sync({"a.json": b"new", "b.json": b"new"})
    assert directory.files == {"a.json": b"a"}
    assert "a.json: No space left on device" in str(directory.error)
    assert [record.message for record in caplog.records] == ["the CDI specs cannot be written"]
    await directory.sync({})
    assert directory.error is None
    assert on_disk(tmp_path) == {"b.json": b"noise"}  # no longer ours


WHOLE = devices_of(state())
PARTS = devices_of(state(), cores=1)
(CARD,) = (device.id for device in WHOLE)
CORES = [device.id for device in PARTS]


def plugin_specs(directory: Path, *, by_cdi: bool = True) -> PluginSpecs:
    return PluginSpecs(directory, KIND, by_cdi=by_cdi)


async def write(
    specs: PluginSpecs,
    offered: Collection[Device],
    *held: str,
    known: bool = True,
    owned: bool = True,
    cards: bool = True,
) -> None:
    await specs.write(offered, set(held) if known else None, owned=owned, cards=cards)
    specs.published()


async def killed(directory: Path, offered: Collection[Device] = WHOLE) -> None:
    """An agent that has offered this and was killed."""
    await write(plugin_specs(directory), offered)


def named(directory: Path) -> list[str] | None:
    """The devices in the spec on disk; None: there is none."""
    path = directory / "furiosa.ai-npu.json"
    if not path.exists():
        return None
    return [device["name"] for device in json.loads(path.read_bytes())["devices"]]


async def test_a_held_device_stays_as_it_was_until_its_pod_has_ended(tmp_path: Path) -> None:
    one = plugin_specs(tmp_path)
    await write(one, WHOLE)
    assert named(tmp_path) == [CARD]
    await write(one, PARTS, CARD)
    assert named(tmp_path) == [*CORES, CARD]
    await write(one, (), CARD)  # the card has gone, or is disabled
    assert named(tmp_path) == [CARD]
    await write(one, PARTS)
    assert named(tmp_path) == CORES
    await write(one, ())
    assert named(tmp_path) is None


async def test_a_device_granted_while_a_spec_is_written_without_it_returns(tmp_path: Path) -> None:
    one = plugin_specs(tmp_path)
    await write(one, WHOLE)
    await one.write(PARTS, set(), owned=True, cards=True)  # and not offered yet
    assert named(tmp_path) == CORES
    await one.write(PARTS, {CARD}, owned=True, cards=True)
    assert named(tmp_path) == [*CORES, CARD]


async def test_specs_of_a_killed_agent_stay_while_their_devices_are_held(tmp_path: Path) -> None:
    await killed(tmp_path)
    one = plugin_specs(tmp_path)
    # It stands by: the agent that serves the node may have another config.
    await write(one, PARTS, owned=False)
    assert named(tmp_path) == [CARD]
    await write(one, PARTS, CARD)
    assert named(tmp_path) == [*CORES, CARD]
    await write(one, PARTS)
    assert named(tmp_path) == CORES


async def test_without_cards_old_specs_go_when_their_devices_are_known_to_be_free(
    tmp_path: Path,
) -> None:
    """Without cards no agent becomes the owner of the node."""
    await killed(tmp_path)
    one = plugin_specs(tmp_path)
    await write(one, (), known=False, owned=False, cards=False)
    await write(one, (), CARD, owned=False, cards=False)
    assert named(tmp_path) == [CARD]
    await write(one, (), owned=False, cards=False)
    assert named(tmp_path) is None
    # What was read then is not what is there when the node becomes ours.
    await killed(tmp_path)
    await write(one, PARTS, CARD)
    assert named(tmp_path) == [*CORES, CARD]


async def test_without_cdi_names_old_specs_go_with_the_last_pod_that_has_their_devices(
    tmp_path: Path,
) -> None:
    await killed(tmp_path, PARTS)
    one = plugin_specs(tmp_path, by_cdi=False)
    await write(one, WHOLE, CORES[0])
    assert named(tmp_path) == [CORES[0]]
    await write(one, WHOLE)
    assert named(tmp_path) is None


async def test_without_cdi_names_another_programs_spec_stays(tmp_path: Path) -> None:
    (tmp_path / "furiosa.ai-npu.json").write_text(
        '{"kind": "furiosa.ai/npu", "devices": []}', encoding="utf-8"
    )
    await write(plugin_specs(tmp_path, by_cdi=False), WHOLE)
    assert named(tmp_path) == []


async def test_without_cdi_names_a_spec_that_cannot_be_removed_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed(tmp_path)
    one = plugin_specs(tmp_path, by_cdi=False)
    monkeypatch.setattr(files, "replace", AsyncMock(side_effect=OSError(errno.EROFS, "read-only")))
    for _ in range(2):
        await write(one, WHOLE)
    assert (one.error, one.unwritten, named(tmp_path)) == (None, frozenset(), [CARD])
