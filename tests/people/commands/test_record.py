"""`npu-agent record`: what it takes and replaces, and that the host is shown the same again."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import os
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_agent.cli.main import main
from npu_agent.core.hardware import Snapshot
from npu_agent.people import simulator
from npu_agent.people.cards import read_once
from npu_agent.people.commands import record
from npu_agent.people.commands.redaction import Redaction
from npu_agent.people.simulator import replay
from npu_agent.people.simulator.replay import LARGEST, MANIFEST, Recording, load
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.hosts.records import HOSTS
from tests.inventory.helpers import management, replayed, tree, write

UID = "3f2b8c1d-0a4e-4c55-9d7e-8f1a2b3c4d5e"


def recorded(root: Path, file: Path) -> Recording:
    assert main(["record", str(file), "--host-root", str(root)]) == 0
    return load(file)


def shown(root: Path) -> Snapshot:
    """The cards of a tree, without what tells them from all others in the world."""
    found = asyncio.run(read_once(Furiosa(root)))
    cards = []
    for number, state in enumerate(found.cards):
        card = replace(state.card, uuid=f"{number}", serial=None)
        reading = state.reading and replace(state.reading, at=0.0)
        reason = state.health.reason.replace(str(root), "")
        health = replace(state.health, since=0.0, reason=reason)
        cards.append(replace(state, id="", card=card, reading=reading, health=health))
    return replace(found, cards=tuple(cards))


def sent(host: Path, directory: Path) -> Path:
    """A tree that shows the host's record."""
    recorded(host, directory / "record.tar.gz")
    return replayed(directory / "again", directory / "record.tar.gz")


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_shows_the_same_after_it_was_sent(name: str, tmp_path: Path) -> None:
    host = HOSTS[name].make(tmp_path / "host")
    assert shown(sent(host, tmp_path)) == shown(host)


FAULTS = (
    *("hang", "unreadable", "garbage", "dead", "no-node", "slow", "busy"),
    *("narrow", "slow-link", "bus-errors"),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_card_is_as_faulty_after_it_was_sent(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_DEADLINE", 0.2)
    host = tree(tmp_path / "host", "warboy=1,rngd=1")
    for card in ("npu0", "npu1"):
        simulator.apply_fault(host, card, fault)
    assert shown(sent(host, tmp_path)) == shown(host)


def test_an_identity_of_card_or_host_is_replaced_by_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", "rack-7-secret.example.com")
    uname = os.uname_result(("Linux", "host-9.example.com", "6.8.0", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: uname)
    host = tree(tmp_path / "host", "rngd=2")
    first, second = (card.spec for card in simulator.cards(host))
    entry = management(host, 0, "rngd")
    write(entry / "chip_info", f"{first.serial} {first.uuid.lower()} on rack-7-secret\n")
    write(entry / "lot", f"{second.serial}x, host-9 is HOST-9.example.com, {UID}\n")
    pods = host / f"sys/fs/cgroup/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    (pods / "cri-containerd-0123.scope").mkdir(parents=True)
    (host / f"sys/fs/cgroup/kubepods/pod{UID}").mkdir(parents=True)
    # A static Pod's has no dashes. Names of files, links and nodes may tell as much as contents.
    plain_uid = UID.replace("-", "")[::-1]
    (host / f"sys/fs/cgroup/kubepods/burstable/pod{plain_uid}").mkdir(parents=True)
    write(entry / f"log-{first.serial}", f"{first.uuid.replace('-', '')}\n")
    (entry / f"of-{first.serial}").symlink_to(f"log-{first.serial}")
    write(host / f"dev/rngd/npu0-{first.serial}", "")
    found = recorded(host, tmp_path / "record.tar.gz")
    everything = gzip.decompress((tmp_path / "record.tar.gz").read_bytes()).lower()
    chips = [management(host, index, "rngd") / "soc_id" for index in range(2)]
    uuids = [first.uuid, first.uuid.replace("-", ""), second.uuid]
    secrets = [
        first.serial,
        second.serial,
        *uuids,
        UID,
        UID.replace("-", "_"),
        plain_uid,
        "rack-7-secret",
    ]
    for secret in (
        *secrets,
        "host-9",
        *(path.read_text(encoding="utf-8").strip() for path in chips),
    ):
        assert secret.lower().encode() not in everything, secret
    at = "sys/devices/virtual/rngd_mgmt/rngd!npu0mgmt"
    serial, uuid = (found.contents[f"{at}/{name}"].strip() for name in ("device_sn", "device_uuid"))
    assert found.contents[f"{at}/chip_info"].split()[:2] == [serial, uuid]
    assert len(serial) == len(first.serial)
    assert found.contents[f"{at}/lot"].startswith(b"S0")
    assert any(
        re.fullmatch("sys/fs/cgroup/kubepods/pod0{8}-.*", path)
        for path in found.manifest.directories
    )


@pytest.mark.parametrize("word", ["warboy", "rngd", "localhost"])
def test_a_host_that_is_called_like_a_family_is_shown_as_it_is(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", word)
    host = tree(tmp_path / "host", "warboy=1,rngd=1")
    write(management(host, 1, "rngd") / "device_sn", "0000\n")
    assert shown(sent(host, tmp_path)) == shown(host)


@pytest.mark.parametrize("content", [b"", b"\n", b"x", b"\xfe\x00" * 9, b"7" * 100, b" a b \n"])
def test_an_identity_of_any_form_is_replaced_where_it_stands(content: bytes) -> None:
    redaction = Redaction({"sys/device_sn": content})
    made = redaction.content("sys/device_sn", content)
    assert (made == content) is (not content.strip())
    assert content.strip() not in made or len(content.strip()) < 2
    others = b"device x of a b"  # too short to look for
    assert redaction.content("sys/log", others) == others


BOARD = b"BRD-99887766"


@pytest.mark.parametrize(
    "name", ["device_sn", "board_serial", "SerialNumber", "hbm_sn", "sn", "asset_tag", "mac_info"]
)
@pytest.mark.parametrize(
    "content",
    [
        b"%b",
        b"%b\n",
        b"%b\0\0\0\n",
        b"SN: %b\n",
        b"PCB serial number:%b\n",
        b"lot 7\nboard %b\n",
        b"'%b' (made 2026)",
    ],
)
def test_the_content_of_an_identity_file_is_replaced_in_every_file(
    name: str, content: bytes
) -> None:
    contents = {
        f"sys/a/{name}": content % BOARD,
        "sys/a/log": b"card %b failed\n" % BOARD.lower(),
        "sys/a/longer": b"x%b_2y npu0\n" % BOARD,
    }
    redaction = Redaction(contents)
    made = {path: redaction.content(path, content) for path, content in contents.items()}
    for path, text in made.items():
        assert b"99887766" not in text, path
    assert made["sys/a/longer"].endswith(b"_2y npu0\n")
    assert (
        redaction.text(f"sys/a/of-{BOARD.decode()}")
        == f"sys/a/of-{made['sys/a/log'].split()[1].decode()}"
    )


@pytest.mark.parametrize(
    ("content", "made"),
    [
        (b"mac 00:1A:2b:3c:4d:5e up", b"mac 02:00:00:00:00:01 up"),
        (b"mac:00-1A-2b-3c-4d-5e", b"02-00-00-00-00-01"),
        (b"80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03", b"02:00:00:00:00:01"),
        (b"server 192.168.7.9, 192.168.7.9:80.", b"server 10.0.0.1, 10.0.0.1:80."),
        (b"at:fe80::21a:2bff%eth0", b"at:fd00::1%eth0"),
        (b"2001:db8:0:1:2:3:4:5 ::ffff:10.1.2.3", b"fd00::1 fd00::2"),
        (b"PCB SN: K-4711, S/N=K-4711", b"PCB SN: S00001, S/N=S00001"),
        (b'{"serialNumber": "X9-1177"}', b'{"serialNumber": "S000001"}'),
        (b"sn\n2026.3.1, e28c5c0 0000:01:00.0 508:0 12:30:59 v1.2.3", None),
        (b"std::array 0x00:0x11 serial console 1-2-3-4-5-6", None),
    ],
)
def test_text_in_the_form_of_an_identity_is_replaced_in_every_file(
    content: bytes, made: bytes | None
) -> None:
    redaction = Redaction({"sys/log": content})
    text = redaction.content("sys/log", content)
    assert text == content if made is None else made in text


@pytest.mark.parametrize(
    "content",
    [b":" * LARGEST + b"g", b"sn:" * 20_000, b"a:" * 30_000, b"1." * 30_000, b"f" * LARGEST],
)
def test_a_file_of_any_content_is_searched_in_time_that_grows_with_its_size(content: bytes) -> None:
    """Patterns that search it anew from each of its bytes would take minutes: pytest's timeout."""
    contents = {"sys/log": content, "sys/serial": content}
    assert Redaction(contents).content("sys/log", content)


def test_the_summary_names_files_that_no_parser_reads_and_show_prints_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = tree(tmp_path / "host", "rngd=1")
    entry = management(host, 0, "rngd")
    write(entry / "vpd_text", "PCB SN: BRD-99887766\n\x1b[31mrack 7\n")
    write(entry / "fan", b"\xff\n")
    file = tmp_path / "record.tar.gz"
    found = recorded(host, file)
    summary = capsys.readouterr().err
    assert "host names: the known ones" in summary
    assert "npu-agent does not know these files, and they may have others: " in summary
    unknown = summary.partition("have others: ")[2].partition("\n")[0].split(", ")
    assert {"vpd_text", "fan"} <= {*unknown}
    assert not {"device_sn", "uevent", "temp1_input", "alloc_status"} & {*unknown}
    assert f"npu-agent record --show {file}" in summary
    assert main(["record", "--show", str(file)]) == 0
    shown = capsys.readouterr().out
    headings = [line.split()[1] for line in shown.splitlines() if line.startswith("== ")]
    assert headings == [MANIFEST, *found.contents]
    at = "sys/devices/virtual/rngd_mgmt/rngd!npu0mgmt"
    assert f"== {at}/fan (npu-agent does not know this file)\n\\xff\n== " in shown
    assert "\n\\u001b[31mrack 7\n== " in shown
    assert f"== {at}/device_state\n1\n== " in shown
    assert "99887766" not in shown
    assert main(["record", "--show", str(tmp_path / "none")]) == 2
    assert "cannot read the record" in capsys.readouterr().err
    write(file, b"nonsense")
    assert main(["record", "--show", str(file)]) == 2
    assert "cannot be used as a record" in capsys.readouterr().err


def test_no_file_is_opened_in_dev_or_read_that_may_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tree(tmp_path / "host", "rngd=1")
    entry = management(host, 0, "rngd")
    write(entry / "device_reset", "1\n")
    write(entry / "secret_order", "1\n")
    (entry / "secret_order").chmod(0o200)
    pci = (host / "sys/bus/pci/devices/0000:01:00.0").resolve()
    for name in ("rom", "config", "vpd", "resource0", "remove"):
        write(pci / name, "acts\n")
    write(host / "dev/rngd/npu0p2pmem", "")
    opened: list[str] = []
    real = os.open

    def noted(path: os.PathLike[str] | str, *args: Any, **more: Any) -> int:
        opened.append(str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", noted)
    found = recorded(host, tmp_path / "record.tar.gz")
    below = {path.removeprefix(str(host)) for path in opened if path.startswith(str(host))}
    assert any(path.endswith("/device_type") for path in below)
    assert not [path for path in below if path.startswith("/dev")]
    acting = ("device_reset", "secret_order", "rom", "config", "vpd", "resource0", "remove")
    assert not [path for path in below if path.endswith(acting)]
    assert not [path for path in found.contents if path.endswith(acting)]
    at = "sys/devices/virtual/rngd_mgmt/rngd!npu0mgmt"
    assert found.manifest.unread == {
        f"{at}/device_reset": "it may act when it is read",
        f"{at}/secret_order": "it is write-only",
    }
    assert found.manifest.nodes["dev/rngd/npu0p2pmem"].startswith("- 0:0 ")


def test_a_file_that_may_not_be_read_is_named_and_refuses_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Warboy's counters do while a core is free."""
    host = tree(tmp_path / "host", "warboy=1")
    simulator.apply_fault(host, "npu0", "busy")
    real = os.open

    def refusing(path: os.PathLike[str] | str, *args: Any, **more: Any) -> int:
        if str(path).endswith("perf_regs"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        found = recorded(host, tmp_path / "record.tar.gz")
    at = "sys/devices/virtual/npu_mgmt/npu0pe"
    cores = ("0", "0-1", "1")
    assert found.manifest.unread == {f"{at}{core}/perf_regs": "EACCES" for core in cores}
    (state,) = shown(replayed(tmp_path / "again", tmp_path / "record.tar.gz")).cards
    assert state.reading
    assert [core.utilization for core in state.reading.cores] == [0.0, 0.0]


def test_files_and_time_are_bounded_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = tree(tmp_path / "host", "rngd=1")
    write(management(host, 0, "rngd") / "huge", b"\x00" * (1 << 20))
    found = recorded(host, tmp_path / "whole.tar.gz")
    huge = found.contents["sys/devices/virtual/rngd_mgmt/rngd!npu0mgmt/huge"]
    assert (len(huge), found.manifest.incomplete) == (LARGEST, None)
    for name, value, said in (
        ("MOST_FILES", 30, "the host has more than 30 files"),
        ("MOST_BYTES", LARGEST, "its files have more than 0 MiB"),
        ("_LONGEST", 0.0, "its drivers take more than 0 s to answer"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(record if name == "_LONGEST" else replay, name, value)
            assert main(["record", str(tmp_path / name), "--host-root", str(host)]) == 0
        found = load(tmp_path / name)
        assert found.manifest.incomplete == said
        assert f"not complete: {said}" in capsys.readouterr().err
        assert len(found.contents) <= 30


def test_names_that_a_record_cannot_have_are_left_out(tmp_path: Path) -> None:
    host = tree(tmp_path / "host", "warboy=1")
    entry = management(host, 0)
    for name in ("two words", "naïve", "x" * 130, "y" * 120, "a\nb"):
        write(entry / os.fsdecode(name.encode()), "1\n")
    (entry / "out").symlink_to("../../../../../../../etc")
    (entry / "subsystem").symlink_to("../../../../class/npu_mgmt")
    found = recorded(host, tmp_path / "record.tar.gz")
    at = "sys/devices/virtual/npu_mgmt/npu0_mgmt"
    assert found.manifest.unread == {
        f"{at}/*": "names that do not fit into a record",
        f"{at}/out": "a link that leads out of /sys",
    }
    assert found.manifest.links[f"{at}/subsystem"] == "../../../../class/npu_mgmt"
    assert f"{at}/{'y' * 120}" in found.contents


def test_a_host_without_drivers_gives_a_record_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    found = recorded(tmp_path / "host", tmp_path / "record.tar.gz")
    assert (found.contents, found.manifest.nodes, found.manifest.unread) == ({}, {}, {})


def test_a_record_goes_to_a_new_file_or_to_stdout(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, file = tree(tmp_path / "host", "warboy=1"), tmp_path / "record.tar.gz"
    words = ["record", str(file), "--host-root", str(host)]
    assert main(words) == 0
    first = file.read_bytes()
    assert b"look into it before you send it" in capfdbinary.readouterr().err
    assert main(words) == 1
    assert b"is there already: give another name" in capfdbinary.readouterr().err
    assert main(["record", "-", "--host-root", str(host)]) == 0
    assert capfdbinary.readouterr().out == first == file.read_bytes()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["record", "-", "--host-root", str(host)]) == 2
    assert capfdbinary.readouterr().out == b""
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert tar.getnames()[0] == MANIFEST
        assert all(member.isreg() and not member.uid for member in tar)
