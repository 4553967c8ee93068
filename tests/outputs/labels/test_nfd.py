"""The feature file for Node Feature Discovery, and what the machine is called."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from npu_agent import files
from npu_agent.core.hardware import Snapshot
from npu_agent.outputs.labels.compute import Machine, labels
from npu_agent.outputs.labels.labeller import OutputError
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.outputs.labels.nfd import NfdOutput, parse, render
from npu_agent.vendors.furiosa.labels import SETS
from tests.inventory.helpers import tree
from tests.outputs.labels.test_compute import HOSTS

ONE = {"beta.furiosa.ai/npu.count": "1", "beta.furiosa.ai/npu.family": "warboy"}
TWO = ONE | {"beta.furiosa.ai/npu.count": "2"}


@pytest.fixture
def output(tmp_path: Path) -> NfdOutput:
    output = NfdOutput(tmp_path)
    output.path.parent.mkdir(parents=True)
    return output


def names(output: NfdOutput) -> list[str]:
    return sorted(path.name for path in output.path.parent.iterdir())


async def test_the_file_has_a_line_a_label_and_nothing_beside_it(output: NfdOutput) -> None:
    done = await output.put(ONE, careful=False)
    assert done == Counter(written=2)
    assert output.path.read_bytes() == (
        b"beta.furiosa.ai/npu.count=1\nbeta.furiosa.ai/npu.family=warboy\n"
    )
    assert output.path.stat().st_mode & 0o777 == 0o644  # nfd-worker is not root
    assert names(output) == ["npu-agent"]
    assert str(output.path).endswith("/etc/kubernetes/node-feature-discovery/features.d/npu-agent")


async def test_nothing_is_written_without_a_change(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    before = output.path.stat()
    assert (await NfdOutput(output.path.parents[4]).put(ONE, careful=False)).total() == 0
    after = output.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_without_labels_there_is_no_file(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    assert await output.put({}, careful=False) == Counter(removed=2)
    assert names(output) == []
    assert (await output.put({}, careful=False)).total() == 0


async def test_what_somebody_else_did_to_the_file_is_undone(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    output.path.write_text("# mine\nbeta.furiosa.ai/npu.count=9\nevil=1\n")
    assert await output.put(ONE, careful=False) == Counter(put_back=2, removed=1)
    assert output.path.read_bytes() == render(ONE)
    output.path.unlink()
    assert await output.put(ONE, careful=False) == Counter(put_back=2)
    output.path.write_bytes(b"\n" + (render(ONE) or b""))  # the same labels in other words
    assert (await output.put(ONE, careful=False)).total() == 0


async def test_a_careful_put_leaves_what_is_there(output: NfdOutput) -> None:
    assert await output.put(ONE, careful=True) == Counter(written=2)
    assert await output.put({}, careful=True) == Counter(left=2)
    assert await output.put(TWO, careful=True) == Counter(left=1)
    assert output.path.read_bytes() == render(ONE)
    assert (await output.put(ONE, careful=True)).total() == 0
    assert await output.put(TWO, careful=False) == Counter(written=1)


async def test_clear_takes_away_ours_and_nothing_else(output: NfdOutput) -> None:
    other = output.path.with_name("other")
    other.write_text("vendor.io/x=1\n")
    await output.put(ONE, careful=False)
    assert await output.clear() == ONE.keys()
    assert names(output) == ["other"]
    assert await output.clear() == set()


async def test_a_missing_directory_is_told_with_its_remedy(tmp_path: Path) -> None:
    output = NfdOutput(tmp_path)
    with pytest.raises(OutputError, match=r"features\.d is missing: install Node") as e:
        await output.put(ONE, careful=False)
    assert e.value.kind == "no_directory"
    assert list(tmp_path.iterdir()) == [], "an NFD that is not there was made up"
    assert (await output.put({}, careful=False)).total() == 0
    output.path.parent.mkdir(parents=True)
    assert await output.put(ONE, careful=False) == Counter(written=2)


async def test_a_file_that_cannot_be_written_is_told_with_its_remedy(
    output: NfdOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _flags: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "regular", refuse)
    with pytest.raises(OutputError, match=r"npu-agent cannot be replaced: Read-only") as e:
        await output.put(ONE, careful=False)
    assert e.value.kind == "unwritable"
    assert str(output.path) in str(e.value)


async def test_a_file_system_that_hangs_is_told_and_recovered_from(
    output: NfdOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, opened = threading.Event(), files.regular

    def hang(path: Path, flags: int) -> int:
        free.wait()
        return opened(path, flags)

    monkeypatch.setattr(files, "regular", hang)
    hasty = NfdOutput(output.path.parents[4], deadline=0.05)
    for _ in range(2):
        with pytest.raises(OutputError, match=r"no answer within 0\.05 s") as e:
            await hasty.put(ONE, careful=False)
        assert e.value.kind == "timeout"
    free.set()
    await output.put(ONE, careful=False)
    assert output.path.read_bytes() == render(ONE)


def test_a_file_is_read_as_nfd_reads_it() -> None:
    assert parse(b"# +expiry-time=2012-07-28T11:22:33Z\n\n a/b=c=d \nflag\n\xff=1\n") == {
        "a/b": "c=d",
        "flag": "true",
        "\ufffd": "1",
    }
    assert parse(None) == {}


@pytest.mark.parametrize("name", HOSTS)
def test_every_host_gives_a_file_that_says_the_same(name: str) -> None:
    snapshot, machine = HOSTS[name]
    wanted = labels(snapshot, machine, SETS.values())
    content = render(wanted)
    assert parse(content) == wanted
    assert (content is None) == (not wanted)
    assert len(content or b"") < 65536  # NFD ignores larger ones


async def test_the_machine_is_what_its_firmware_says(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    assert await read_machine(root) == Machine(vendor="npu-agent\n", name="Simulated Host\n")


async def test_a_machine_without_names_has_none(tmp_path: Path) -> None:
    assert await read_machine(tmp_path) == Machine(vendor=None, name=None)
    directory = tmp_path / "sys/class/dmi/id"
    (directory / "sys_vendor").mkdir(parents=True)
    (directory / "product_name").symlink_to("product_name")
    assert await read_machine(tmp_path) == Machine(vendor=None, name=None)


async def test_hostile_names_are_read_up_to_256_bytes(tmp_path: Path) -> None:
    directory = tmp_path / "sys/class/dmi/id"
    directory.mkdir(parents=True)
    (directory / "sys_vendor").write_bytes(b"\xff\xfe\0" * 5000)
    (directory / "product_name").write_bytes("é".encode() * 127 + b"\n" + "é".encode() * 99)
    machine = await read_machine(tmp_path)
    assert machine.vendor == ("\ufffd\ufffd\0" * 86)[:256]
    assert machine.name == "é" * 127 + "\n" + "\ufffd"
    assert labels(Snapshot(), machine, SETS.values()) == {}
