"""A container is given devices, and one thing after the other is wrong with what it got.

What it got is what a real Allocate answers, so that agent and `verify` cannot come to differ.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from npu_agent.core.hardware import CardState
from npu_agent.core.health import Policy
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.people import iouring
from npu_agent.people.commands import verify as room
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.simulator.tree import STATE_DIR
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import allocate, devices, state
from tests.processes import ran

WARBOYS = (state("warboy", 0), state("warboy", 1))
RNGDS = (state("rngd", 2), state("rngd", 3))


@dataclass
class Container:
    """What a container sees: a root directory and its environment."""

    root: Path
    environ: dict[str, str]

    def checks(self, expect: int | None = None, deadline: float = 5.0) -> dict[str, Check]:
        checking = room.verify(self.root, self.environ, Policy(), expect=expect, deadline=deadline)
        found = asyncio.run(checking)
        assert len(found) == len({check.name for check in found})
        return {check.name: check for check in found}

    def failures(self, expect: int | None = None) -> dict[str, str]:
        return {
            name: f"{check.detail}; {check.remedy}"
            for name, check in self.checks(expect).items()
            if check.state is State.WRONG
        }

    def node(self, path: str) -> Path:
        made = self.root / "dev" / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
        return made


def given(root: Path, name: str) -> Container:
    """A container that Allocate gave what GRANTS has by this name."""
    ids, cards, cores = GRANTS[name]
    listed = {device.id: device for device in devices(*cards, cores=cores)}
    raw = allocate([ids], listed, "r")
    (granted,) = wire.AllocateResponse().parse(raw).container_responses
    container = Container(root, dict(granted.envs))
    # As in a simulated tree, where plain files stand for nodes: not only root can run this.
    (root / STATE_DIR).mkdir()
    for each in granted.devices:
        container.node(each.container_path.removeprefix("/dev/"))
    return container


GRANTS: dict[str, tuple[tuple[str, ...], tuple[CardState, ...], int | None]] = {
    "a Warboy": (("WARBOY-0",), WARBOYS, None),
    "two Warboys": (("WARBOY-0", "WARBOY-1"), WARBOYS, None),
    "a core": (("WARBOY-1_cores_0",), WARBOYS, 1),
    "both cores": (("WARBOY-0_cores_0", "WARBOY-0_cores_1"), WARBOYS, 1),
    "cores of two cards": (("WARBOY-0_cores_1", "WARBOY-1_cores_0"), WARBOYS, 1),
    "an RNGD": (("RNGD-2",), RNGDS, None),
    "half an RNGD": (("RNGD-2_cores_4-7",), RNGDS, 4),
    "a quarter of each": (("RNGD-2_cores_2-3", "RNGD-3_cores_0-1"), RNGDS, 2),
    "a core of an RNGD": (("RNGD-3_cores_5",), RNGDS, 1),
    "without a fused node": (("W",), (state("warboy", 0, id_="W", missing=("pe0-1",)),), None),
}


@pytest.fixture(autouse=True)
def unfiltered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Pod that may use io_uring, wherever the tests run: test_iouring.py has the calls."""
    monkeypatch.setattr(iouring, "refused", dict)


@pytest.fixture
def warboy(tmp_path: Path) -> Container:
    return given(tmp_path, "a Warboy")


@pytest.mark.parametrize("name", GRANTS)
def test_a_grant_of_allocate_is_good(name: str, tmp_path: Path) -> None:
    container = given(tmp_path, name)
    assert container.failures(expect=len(GRANTS[name][0])) == {}
    if name == "a Warboy":
        assert [f"{c.name}: {c.detail}" for c in container.checks().values()] == [
            "environment: NPU_DEVNAME=npu0pe0-1 and FURIOSA_DEVICES=npu:0:0-1",
            "npu0: FuriosaAI Warboy: 9 device nodes, each one opens for reading and writing",
            "/dev: nothing of other cards or cores",
        ]


# Without its fused node a Warboy has the names of its two cores, which do without /dev/npu0.
@pytest.mark.parametrize("name", sorted(GRANTS.keys() - {"without a fused node"}))
def test_every_node_that_allocate_gives_has_to_be_there(name: str, tmp_path: Path) -> None:
    container = given(tmp_path, name)
    nodes = sorted(path for path in (tmp_path / "dev").rglob("*") if path.is_file())
    for node in nodes[:: max(1, len(nodes) // 9)]:
        node.unlink()
        assert list(container.failures()) == [f"/{node.relative_to(tmp_path)}"]
        node.touch()


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("a Warboy", "npu1pe0"),
        ("a Warboy", "rngd/npu2mgmt"),
        ("a core", "npu1pe1"),
        ("a core", "npu1"),
        ("half an RNGD", "rngd/npu2pe0-3"),
        ("half an RNGD", "rngd/npu3bar0"),
    ],
)
def test_more_than_was_given(name: str, seen: str, tmp_path: Path) -> None:
    container = given(tmp_path, name)
    container.node(seen)
    failures = container.failures()
    assert list(failures) == ["/dev"]
    assert f"sees more devices than it was granted: /dev/{seen}" in failures["/dev"]
    assert "privileged" in failures["/dev"]


def test_other_nodes_in_dev_are_ignored(warboy: Container) -> None:
    for name in ("null", "npu0x", "npuX", "npu", "shm/npu1pe0"):
        warboy.node(name)
    assert warboy.failures() == {}


@pytest.mark.parametrize(
    ("environ", "line", "words"),
    [
        ({"NPU_DEVNAME": None}, "NPU_DEVNAME", "is not set: this container has no NPU"),
        ({"FURIOSA_DEVICES": None}, "FURIOSA_DEVICES", "is not set"),
        ({"FURIOSA_DEVICES": ""}, "FURIOSA_DEVICES", "is not set"),
        ({"NPU_DEVNAME": "npu0"}, "NPU_DEVNAME", "'npu0' has not the form npu0pe0-1"),
        ({"NPU_DEVNAME": "npu0pe0-1,"}, "NPU_DEVNAME", "has not the form"),
        ({"FURIOSA_DEVICES": "npu:0:*"}, "FURIOSA_DEVICES", "has not the form npu:0:0-1 or npu:0"),
        ({"FURIOSA_DEVICES": "npu:1:0-1"}, "environment", "name different cores"),
        ({"FURIOSA_DEVICES": "npu:0:0"}, "environment", "name different cores"),
    ],
)
def test_an_environment_that_is_not_right(
    environ: dict[str, str | None], line: str, words: str, warboy: Container
) -> None:
    changed = {**warboy.environ, **environ}
    warboy.environ = {key: value for key, value in changed.items() if value is not None}
    failures = warboy.failures()
    # The other variable, or the cores that are good, still say what should be there.
    assert set(failures) - {"npu0pe1"} == {line}
    assert words in failures[line]


@pytest.mark.parametrize("items", ["npu:2", "npu:2:0-3,npu:2:4-7", "npu:2:4-7,npu:2:0-3"])
def test_a_whole_card_or_its_parts_by_number(items: str, tmp_path: Path) -> None:
    """Two halves are two devices, and the nodes of both are those of the card."""
    container = given(tmp_path, "an RNGD")
    assert container.environ["FURIOSA_DEVICES"] == "npu:2"
    container.environ["FURIOSA_DEVICES"] = items
    assert container.failures() == {}


@pytest.mark.parametrize(
    ("name", "items"), [("an RNGD", "npu:3"), ("half an RNGD", "npu:2"), ("a Warboy", "npu:0")]
)
def test_a_whole_card_that_is_another_than_its_nodes(name: str, items: str, tmp_path: Path) -> None:
    container = given(tmp_path, name)
    container.environ["FURIOSA_DEVICES"] = items
    assert "name different cores" in container.failures()["environment"]


def test_no_npu_at_all(tmp_path: Path) -> None:
    container = Container(tmp_path, {})
    assert set(container.failures(expect=1)) == {"NPU_DEVNAME", "FURIOSA_DEVICES"}
    container.node("npu0pe0")
    assert set(container.failures()) == {"NPU_DEVNAME", "FURIOSA_DEVICES", "/dev"}


def test_no_node_of_the_card_at_all(warboy: Container) -> None:
    for path in (warboy.root / "dev").iterdir():
        path.unlink()
    failures = warboy.failures()
    assert list(failures) == ["npu0"]
    assert "CDI is on in the runtime" in failures["npu0"]


def test_cores_that_the_family_does_not_have(warboy: Container) -> None:
    warboy.environ = {"NPU_DEVNAME": "npu0pe2-3", "FURIOSA_DEVICES": "npu:0:2-3"}
    assert "FuriosaAI Warboy has no such cores" in warboy.failures()["npu0pe2-3"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("a Warboy", (1,), (0, 2)),
        ("both cores", (1, 2), (0, 3)),
        ("two Warboys", (2,), (1, 3)),
        ("an RNGD", (1, 2), (3, 8)),  # it has the names of its halves
    ],
)
def test_how_many(name: str, good: tuple[int, ...], bad: tuple[int, ...], tmp_path: Path) -> None:
    container = given(tmp_path, name)
    for count in good:
        assert container.failures(expect=count) == {}
    for count in bad:
        assert f"{count} expected" in container.failures(expect=count)["devices"]


# --- opening

Opening = Callable[[str, int | None], None]


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    """Makes opening a node fail with an errno; None: hang."""
    really, waits = os.open, threading.Event()

    def breaks(name: str, number: int | None) -> None:
        def opens(path: Path, flags: int, *rest: int) -> int:
            if str(path).endswith(f"/dev/{name}"):
                assert flags & (os.O_RDWR | os.O_NONBLOCK) == os.O_RDWR | os.O_NONBLOCK
                if number is None:
                    waits.wait()
                else:
                    raise OSError(number, os.strerror(number))
            return really(path, flags, *rest)

        monkeypatch.setattr(os, "open", opens)

    yield breaks
    waits.set()


@pytest.mark.parametrize(
    ("number", "detail", "remedy"),
    [
        (errno.EBUSY, "in use (EBUSY)", "has it open"),
        (errno.EPERM, "not permitted (EPERM)", "has not granted this device"),
        (errno.EACCES, "not for this user (EACCES)", "runAsUser: 0"),
        (errno.ENXIO, "no device is behind it", "create the Pod again"),
        (errno.ENODEV, "no device is behind it", "create the Pod again"),
        (errno.EIO, "Input/output error", "dmesg"),
    ],
)
def test_a_node_that_does_not_open(
    number: int, detail: str, remedy: str, warboy: Container, opening: Opening
) -> None:
    opening("npu0pe1", number)
    failures = warboy.failures()
    assert list(failures) == ["/dev/npu0pe1"]
    assert detail in failures["/dev/npu0pe1"]
    assert remedy in failures["/dev/npu0pe1"]


def test_a_user_namespace_has_its_own_sentence_once_for_the_card(
    warboy: Container, opening: Opening
) -> None:
    """`hostUsers: false`: root of the Pod is no user of the host, so `runAsUser: 0` is no help."""
    opening("npu0pe1", errno.EACCES)
    uid_map = warboy.root / "proc/self/uid_map"
    uid_map.parent.mkdir(parents=True)
    uid_map.write_text("         0          0 4294967295\n", encoding="utf-8")
    assert list(warboy.failures()) == ["/dev/npu0pe1"], "those of the host"
    uid_map.write_text("         0     131072      65536\n", encoding="utf-8")
    failures = warboy.failures()
    assert list(failures) == ["npu0"]
    assert "which has a user namespace (EACCES)" in failures["npu0"]
    assert "hostUsers: true" in failures["npu0"]


def test_a_node_that_hangs_delays_no_other_card(tmp_path: Path, opening: Opening) -> None:
    container = given(tmp_path, "two Warboys")
    opening("npu0", None)
    checks = container.checks(deadline=0.3)
    assert "no answer within 0.3 s; the card's others were not tried" in checks["/dev/npu0"].detail
    assert checks["npu1"].state is State.OK


def test_a_node_has_to_be_a_device(warboy: Container) -> None:
    """Where no simulator says that plain files stand for nodes."""
    (warboy.root / STATE_DIR).rmdir()
    failures = warboy.failures()
    assert set(failures) == {f"/dev/{node}" for node in FAMILIES["warboy"].nodes(0)}
    assert "is not a character device" in failures["/dev/npu0"]


def test_real_character_devices(warboy: Container) -> None:
    (warboy.root / STATE_DIR).rmdir()
    null = os.makedev(1, 3)
    for node in FAMILIES["warboy"].nodes(0):
        path = warboy.root / "dev" / node
        path.unlink()
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, null)
            path.open("r+b", buffering=0).close()
        except PermissionError:
            pytest.skip("character devices cannot be made, or not opened, here")
    assert warboy.failures() == {}


# --- what a job needs beyond its cards


def test_io_uring_is_needed_by_jobs_on_rngd_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iouring, "refused", lambda: {"io_uring_setup": errno.EPERM})
    for name, lines in (("an RNGD", ["io_uring"]), ("a core of an RNGD", ["io_uring"])):
        (tmp_path / name).mkdir()
        assert list(given(tmp_path / name, name).failures()) == lines
    (tmp_path / "warboy").mkdir()
    warboy = given(tmp_path / "warboy", "a Warboy")
    assert not {"io_uring", "/dev/dma_heap/system"} & warboy.checks().keys()


def test_the_dma_heap_is_a_note(tmp_path: Path) -> None:
    container = given(tmp_path, "an RNGD")
    note = container.checks()["/dev/dma_heap/system"]
    assert note.state is State.NOTE
    assert "deviceNodes: [/dev/dma_heap/system]" in note.remedy
    container.node("dma_heap/system")
    assert container.checks()["/dev/dma_heap/system"].state is State.OK


# --- the command


@pytest.mark.parametrize("options", [(), ("-o", "json")])
def test_outside_of_a_container_with_npus(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, out, err = ran("verify", "--host-root", tmp_path, *options)
    assert (code, out) == (2, "")
    assert "NPU_DEVNAME and FURIOSA_DEVICES are not set" in err
    assert "k8s/verify.gotmpl" in err
    code, out, _ = ran("verify", "--host-root", tmp_path, "--expect=1")
    assert code == 1, "with a number to expect it is in such a container"


def test_the_command(warboy: Container) -> None:
    code, out, err = ran("verify", "--host-root", warboy.root, **warboy.environ)
    assert (code, err) == (0, "")
    assert [line[:13] for line in out.splitlines()] == [
        "ok     enviro",
        "ok     npu0: ",
        "ok     /dev: ",
    ]
    assert ";" not in out, "a remedy"
    code, out, _ = ran("verify", "--host-root", warboy.root, "--expect=2", **warboy.environ)
    assert code == 1
    assert "wrong  devices: 1 given, 2 expected; check that the Pod's" in out
