"""Which devices are in the CDI specs on disk: those that are offered, and those that are held."""

from __future__ import annotations

import errno
import json
from collections.abc import Collection
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.offer import Device
from npu_agent.kubelet.plugin_specs import PluginSpecs
from tests.outputs.deviceplugin.helpers import devices, state

WHOLE = devices(state())
PARTS = devices(state(), cores=1)
(CARD,) = (device.id for device in WHOLE)
CORES = [device.id for device in PARTS]


def specs(directory: Path, *, by_cdi: bool = True) -> PluginSpecs:
    return PluginSpecs(directory, ["furiosa.ai/npu"], by_cdi=by_cdi)


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
    await write(specs(directory), offered)


def named(directory: Path) -> list[str] | None:
    """The devices in the spec on disk; None: there is none."""
    path = directory / "furiosa.ai-npu.json"
    if not path.exists():
        return None
    return [device["name"] for device in json.loads(path.read_bytes())["devices"]]


async def test_what_is_held_stays_as_it_was_until_its_pod_has_ended(tmp_path: Path) -> None:
    one = specs(tmp_path)
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


async def test_what_is_granted_while_a_spec_is_written_without_it_returns(tmp_path: Path) -> None:
    one = specs(tmp_path)
    await write(one, WHOLE)
    await one.write(PARTS, set(), owned=True, cards=True)  # and not offered yet
    assert named(tmp_path) == CORES
    await one.write(PARTS, {CARD}, owned=True, cards=True)
    assert named(tmp_path) == [*CORES, CARD]


async def test_what_a_killed_agent_has_left_stays_while_it_is_held(tmp_path: Path) -> None:
    await killed(tmp_path)
    one = specs(tmp_path)
    # It stands by: the agent that serves the node may have another config.
    await write(one, PARTS, owned=False)
    assert named(tmp_path) == [CARD]
    await write(one, PARTS, CARD)
    assert named(tmp_path) == [*CORES, CARD]
    await write(one, PARTS)
    assert named(tmp_path) == CORES


async def test_without_cards_what_was_left_goes_when_it_is_known_that_it_is_not_held(
    tmp_path: Path,
) -> None:
    """Without cards no agent becomes the owner of the node."""
    await killed(tmp_path)
    one = specs(tmp_path)
    await write(one, (), known=False, owned=False, cards=False)
    await write(one, (), CARD, owned=False, cards=False)
    assert named(tmp_path) == [CARD]
    await write(one, (), owned=False, cards=False)
    assert named(tmp_path) is None
    # What was read then is not what is there when the node becomes ours.
    await killed(tmp_path)
    await write(one, PARTS, CARD)
    assert named(tmp_path) == [*CORES, CARD]


async def test_without_cdi_names_what_was_left_goes_with_the_last_pod_that_has_it(
    tmp_path: Path,
) -> None:
    await killed(tmp_path, PARTS)
    one = specs(tmp_path, by_cdi=False)
    await write(one, WHOLE, CORES[0])
    assert named(tmp_path) == [CORES[0]]
    await write(one, WHOLE)
    assert named(tmp_path) is None


async def test_without_cdi_names_another_programs_spec_stays(tmp_path: Path) -> None:
    (tmp_path / "furiosa.ai-npu.json").write_text('{"kind": "furiosa.ai/npu", "devices": []}')
    await write(specs(tmp_path, by_cdi=False), WHOLE)
    assert named(tmp_path) == []


async def test_without_cdi_names_a_spec_that_cannot_be_removed_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed(tmp_path)
    one = specs(tmp_path, by_cdi=False)
    monkeypatch.setattr(files, "replace", AsyncMock(side_effect=OSError(errno.EROFS, "read-only")))
    for _ in range(2):
        await write(one, WHOLE)
    assert (one.error, one.unwritten, named(tmp_path)) == (None, frozenset(), [CARD])
