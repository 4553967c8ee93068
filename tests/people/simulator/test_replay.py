"""A record that anybody may have made: what is refused, and that a refused one leaves no trace."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from npu_agent.cli.main import main
from npu_agent.people import simulator
from npu_agent.people.simulator import replay
from npu_agent.people.simulator.replay import LARGEST, MANIFEST, MOST_FILES, RecordingError, load

ENTRY = "sys/class/npu_mgmt/npu0_mgmt"
FILES = {f"{ENTRY}/device_type": b"Warboy\n", f"{ENTRY}/alive": b"1\n"}


def manifest(**changes: Any) -> bytes:
    told = {"format": 1, "agent": "0.1.0", "kernel": "6.8.0", "files": len(FILES)}
    return json.dumps({**told, **changes}).encode()


def member(name: str, content: bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(plain.getvalue())


def record(
    *more: tuple[tarfile.TarInfo, bytes], files: Mapping[str, bytes] = FILES, **changes: Any
) -> bytes:
    """A good record but for `more` members and `changes` of its manifest."""
    changes.setdefault("files", len(FILES) + len(more))
    own = (member(MANIFEST, manifest(**changes)), *(member(*file) for file in files.items()))
    return packed(*own, *more)


def refused(content: bytes, directory: Path) -> str:
    """Why; through the command, which has to leave nothing behind."""
    file, root = directory / "record.tar.gz", directory / "root"
    file.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        load(file)
    assert main(["simulate", str(root), "--from", str(file)]) == 2
    assert sorted(path.name for path in directory.iterdir()) == ["record.tar.gz"]
    return str(caught.value)


def test_a_good_one_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pci = "sys/bus/pci/devices/0000:01:00.0"
    more: dict[str, Any] = {
        "links": {pci: "../../../devices/pci0000:00/0000:01:00.0"},
        "nodes": {"dev/npu0": "c 509:0 666", "dev/npu0pe0": "c 509:1 666"},
        "unread": {f"{ENTRY}/atr_error": "EACCES", f"{ENTRY}/x": "it may act when it is read"},
        "directories": ["sys/class/rngd_mgmt"],
        "incomplete": "its drivers take more than 60 s to answer",
    }
    (tmp_path / "record.tar.gz").write_bytes(record(**more))
    root = tmp_path / "root"
    assert main(["simulate", str(root), "--from", str(tmp_path / "record.tar.gz")]) == 0
    assert "it is not complete: its drivers take" in capsys.readouterr().out
    assert (root / ENTRY / "alive").read_bytes() == b"1\n"
    assert (root / ENTRY / "atr_error").read_bytes() == b""
    assert not (root / ENTRY / "x").exists()
    assert str((root / pci).readlink()) == more["links"][pci]
    assert (root / "sys/class/rngd_mgmt").is_dir()
    assert (root / "dev/npu0pe0").exists()
    assert simulator.cards(root) == ()
    assert main(["simulate", str(root), "--from", str(tmp_path / "record.tar.gz")]) == 1
    assert "has a simulated tree; give a new or empty directory" in capsys.readouterr().err


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "damaged or cut off"),
    "no-gzip": (lambda: b"PK\x03\x04" + b"x" * 2000, "damaged or cut off"),
    "an-empty-tar": (packed, "damaged or cut off|its first file is not record.json"),
    "cut-off": (lambda: record()[:-30], "damaged or cut off"),
    "cut-off-in-a-file": (lambda: gzip.compress(gzip.decompress(record())[:2561]), "cut off"),
    "cut-off-between-files": (
        lambda: gzip.compress(gzip.decompress(record())[:2048]),
        "damaged or cut off|it has 1 files in place of 2",
    ),
    "one-bit-wrong": (lambda: record()[:-8] + b"\x00" * 8, "damaged or cut off"),
    "no-manifest": (lambda: packed(member("sys/x", b"1")), "its first file is not record.json"),
    "a-manifest-of-nonsense": (lambda: packed(member(MANIFEST, b"{]")), "record.json: "),
    "a-manifest-of-depth": (lambda: packed(member(MANIFEST, b"[" * 100_000)), "record.json: "),
    "without-a-field": (
        lambda: packed(member(MANIFEST, b'{"format": 1, "agent": "1"}')),
        "kernel",
    ),
    "another-version": (
        lambda: record(format=2, agent="9.0\x1b[31m", surprise=1),
        r"npu-agent '9\.0\\x1b\[31m' wrote it in format 2, and this one reads 1",
    ),
    "fewer-files-than-it-says": (lambda: record(files={}), "0 files in place of 2"),
    "twice": (lambda: record(member(f"{ENTRY}/alive", b"0\n")), "'.*alive' is in it twice"),
    "above": (lambda: record(member("sys/../../x", b"1")), "is not a path below /sys/"),
    "deep-directories": (
        lambda: record(directories=[f"sys/{at}" + "/a" * 21 for at in range(MOST_FILES // 10)]),
        "it has more than .* files and directories",
    ),
    "a-file-in-dev": (lambda: record(member("dev/null", b"1")), "is not a path below /sys/"),
    "a-name-with-a-line": (lambda: record(member("sys/a\nb", b"1")), "is not a path below /sys/"),
    "a-long-name": (lambda: record(member(f"sys/{'x' * 200}", b"1")), "is not a plain file"),
    "a-link-with-a-long-name": (
        lambda: record(
            member("././@LongLink", b"sys/x", type=tarfile.GNUTYPE_LONGNAME),
            member("x", type=tarfile.SYMTYPE, linkname="nowhere"),
        ),
        "'sys/x' is not a plain file",
    ),
    "a-link": (lambda: record(member("sys/x", type=tarfile.SYMTYPE, linkname="/")), "plain file"),
    "sparse": (lambda: record(member("sys/x", type=tarfile.GNUTYPE_SPARSE)), "."),
    "a-large-file": (lambda: record(member("sys/x", b"1" * (LARGEST + 1))), "more than 65536"),
    "a-huge-manifest": (lambda: packed(member(MANIFEST, b" " * (5 << 20))), "more than 4194304"),
    "a-bomb-in-a-header": (
        lambda: packed(
            member("x", b"1" * (36 << 20), type=tarfile.XHDTYPE), member(MANIFEST, manifest())
        ),
        "is not a plain file",
    ),
    "long-names-within-each-other": (
        lambda: packed(
            member(MANIFEST, manifest()),
            *(member("x", b"x", type=tarfile.GNUTYPE_LONGNAME) for _ in range(2000)),
        ),
        "long names are within each other",
    ),
    "another-member": (lambda: record() + gzip.compress(b""), "follows the end of its gzip member"),
    "members-without-content": (
        lambda: gzip.compress(b"") * 600_000,
        "follows the end of its gzip member",
    ),
    "a-file-below-a-file": (lambda: record(member(f"{ENTRY}/alive/x", b"1")), "a file and a dir"),
    "a-file-below-a-link": (
        lambda: record(links={"sys/class/npu_mgmt": "../../sys"}),
        "a file and a directory|the link",
    ),
    "a-link-to-the-root": (lambda: record(links={"sys/a/b": "/etc"}), "leads to '/etc'"),
    "a-link-to-the-outside": (lambda: record(links={"sys/a/b": "../../x"}), "leads to"),
    "a-link-that-turns": (lambda: record(links={"sys/a/b": "c/../../../x"}), "leads to"),
    "a-node-in-sys": (lambda: record(nodes={"sys/a": "c 1:1 666"}), "not a path below /dev/"),
    "a-node-above": (lambda: record(nodes={"dev/../a": "c 1:1 666"}), "not a path below /dev/"),
    "unread-above": (lambda: record(unread={"sys/../../a": "EACCES"}), "not a path below /sys/"),
    "a-directory-above": (lambda: record(directories=["../a"]), "not a path below /sys/"),
    "a-directory-and-a-file": (
        lambda: record(directories=[f"{ENTRY}/alive"]),
        "a file and a directory",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_record_is_refused_and_leaves_no_trace(name: str, tmp_path: Path) -> None:
    make, why = HOSTILE[name]
    said = refused(make(), tmp_path)
    assert said.startswith(f"{tmp_path}/record.tar.gz cannot be used as a record: ")
    assert said.isprintable()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)


def test_files_and_bytes_are_counted_before_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_FILES", 1)
    assert "it has more than 1 files" in refused(record(), tmp_path)
    monkeypatch.setattr(replay, "MOST_FILES", 100)
    bomb = gzip.compress(gzip.decompress(record()) + b"\x00" * (64 << 20))
    assert len(bomb) < 100_000
    assert "it has more than 39 MiB" in refused(bomb, tmp_path)


def test_a_path_that_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(RecordingError, match=r"not a regular file|No such file|a directory"):
            load(tmp_path / name)
        assert main(["simulate", str(tmp_path / "root"), "--from", str(tmp_path / name)]) == 2


@pytest.mark.parametrize("words", [("--cards", "rngd=1"), ("--driver", "2025.4"), ("status",)])
def test_a_record_says_itself_which_cards_there_are(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path / "root"), "--from", "x.tar.gz", *words]) == 2
    assert "--from: the record says which cards there are" in capsys.readouterr().err
