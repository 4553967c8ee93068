import asyncio
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from npu_agent.feed import Feed
from npu_agent.people.simulator import (
    SimulatorError,
    apply_fault,
    cards,
    make,
    parse_cards,
    simulate,
)
from npu_agent.people.simulator.driver import liveness, nodes
from npu_agent.people.simulator.tree import STATE_DIR, tick
from tests.golden import golden
from tests.inventory.helpers import tree
from tests.until import wait_until

from .helpers import listing

GOLDEN = Path(__file__).parent / "golden"
BOTH = "warboy=1,rngd=1"
PAIR = parse_cards(BOTH)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "root", BOTH)


def test_a_fresh_tree_is_the_golden_one(root: Path) -> None:
    found = listing(root)
    assert found == golden(GOLDEN / "warboy=1,rngd=1.txt", found)


def node_files(root: Path) -> list[os.stat_result]:
    """Those of a new tree's device nodes."""
    make(root, PAIR)
    return [(root / path).stat() for spec in PAIR for path in nodes(spec)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make device nodes")
def test_nodes_are_character_devices_for_root(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "probe", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("not even root may make device nodes here")
    for found in node_files(tmp_path / "root"):
        assert stat.S_ISCHR(found.st_mode)
        assert found.st_rdev == os.makedev(1, 3)
        assert stat.S_IMODE(found.st_mode) == 0o666


def test_nodes_are_plain_files_where_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refused)
    for found in node_files(tmp_path / "root"):
        assert stat.S_ISREG(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o666


def test_a_strict_umask_does_not_lock_the_agent_out(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        root = tree(tmp_path / "root", BOTH)
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((root / liveness(PAIR[0])).stat().st_mode) == 0o644


def test_a_tree_made_again_changes_only_files_that_differ(root: Path) -> None:
    before = listing(root)
    inode = (root / liveness(PAIR[0])).stat().st_ino
    tree(root, BOTH)
    assert listing(root) == before
    assert (root / liveness(PAIR[0])).stat().st_ino == inode  # not even written

    (root / "dev/npu0pe0").unlink()
    (root / liveness(PAIR[0])).unlink()
    (root / "sys/class/npu_mgmt/npu0_mgmt").unlink()
    tree(root, BOTH)
    assert listing(root) == before


def test_cards_are_added_and_taken_while_the_others_keep_their_state(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "warboy=1")
    apply_fault(root, "npu0", "dead")
    tick(root)
    telemetry = cards(root)[0].telemetry
    tree(root, "warboy=2,rngd=1")
    assert [found.spec.name for found in cards(root)] == ["npu0", "npu1", "npu2"]
    assert cards(root)[0].telemetry == telemetry
    assert cards(root)[0].faults == ("dead",)

    make(root, [found.spec for found in cards(root)[1:]], plain_nodes=True)
    assert [found.spec.name for found in cards(root)] == ["npu1", "npu2"]
    assert "npu0" not in listing(root)
    tree(root, "warboy=0")
    assert not [line for line in listing(root).splitlines() if "npu1" in line or "npu2" in line]


# Which ROOT is accepted.


def test_the_hosts_own_root_is_refused_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it would have written to this host")

    monkeypatch.setattr(Path, "mkdir", refuse)
    (tmp_path / "link").symlink_to("/")
    for root in (Path("/"), Path("/sys/.."), tmp_path / "link"):
        with pytest.raises(SimulatorError, match="this host itself"):
            make(root, PAIR)
    assert not Path("/", STATE_DIR).exists()


@pytest.mark.parametrize("name", ["file", "sys/class", "dev/null", "etc/hosts"])
def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious", encoding="utf-8")
    before = listing(tmp_path)
    with pytest.raises(SimulatorError, match="not empty"):
        make(tmp_path, PAIR)
    assert listing(tmp_path) == before
    assert not (tmp_path / STATE_DIR).exists()


def test_a_link_as_dev_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/dev").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SimulatorError, match="not empty"):
        make(tmp_path / "root", PAIR)

    (tmp_path / "root/dev").unlink()
    tree(tmp_path / "root", "warboy=0")
    (tmp_path / "root/dev").rmdir()
    (tmp_path / "root/dev").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SimulatorError, match="symbolic link"):
        tree(tmp_path / "root", BOTH)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("field", ["pci_path", "pci_bus_id", "family"])
def test_a_state_that_names_a_place_outside_is_refused_before_anything_is_written(
    field: str, root: Path
) -> None:
    state = root / STATE_DIR / "state.json"
    outside = root.parent / "outside"
    found = json.loads(state.read_bytes())
    found["cards"][0]["spec"][field] = "../../../../../../../outside"
    state.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(SimulatorError, match=r"is outside of|of an unknown family"):
        apply_fault(root, "npu1", "dead")
    assert not outside.exists()
    assert not (root.parent.parent / "outside").exists()


@pytest.mark.parametrize("link", ["sys/devices", "sys/bus/pci", STATE_DIR])
def test_a_link_within_the_tree_that_leads_outside_is_refused(link: str, root: Path) -> None:
    outside = root.parent / "outside"
    shutil.move(root / link, outside)
    (root / link).symlink_to(outside)
    before = listing(outside)
    with pytest.raises(SimulatorError, match=r"is outside of|is a symbolic link"):
        make(root, parse_cards("warboy=3"))
    assert listing(outside) == before


def test_a_mount_below_a_directory_that_is_empty_otherwise_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's container has the host's cgroups and CDI specs in the tree."""
    mounts = (tmp_path / "sys/fs/cgroup", tmp_path / "var/run/cdi")
    for path in mounts:
        path.mkdir(parents=True)
        (path / "precious").write_text("", encoding="utf-8")
    with pytest.raises(SimulatorError, match="not empty"):
        make(tmp_path, PAIR)
    monkeypatch.setattr(Path, "is_mount", lambda path: path in mounts)
    make(tmp_path, PAIR)
    make(tmp_path, ())
    assert all((path / "precious").exists() for path in mounts)


@pytest.mark.parametrize(("says", "name"), [("is_mount", "dev"), ("is_char_device", "null")])
def test_the_nodes_of_a_real_dev_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, name: str
) -> None:
    monkeypatch.setattr(Path, says, lambda path: path.name == name)
    dev = tmp_path / "root/dev"
    (dev / "shm").mkdir(parents=True)
    (dev / "null").write_text("", encoding="utf-8")
    root = tree(tmp_path / "root", BOTH)
    assert (dev / "npu0").exists()
    make(root, ())
    assert sorted(path.name for path in dev.iterdir()) == ["null", "shm"]


def test_a_node_of_another_program_is_never_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "dev")
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/npu0").write_text("a real one", encoding="utf-8")
    with pytest.raises(SimulatorError, match="did not make it"):
        tree(tmp_path / "root", BOTH)
    assert not (tmp_path / "root/sys").exists()
    assert (tmp_path / "root/dev/npu0").read_text(encoding="utf-8") == "a real one"

    (tmp_path / "root/dev/npu0").unlink()
    tree(tmp_path / "root", BOTH)  # a first attempt that failed is no obstacle


def test_only_a_simulated_tree_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for root in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        for change in (
            lambda root: apply_fault(root, "npu0", "dead"),
            tick,
            cards,
        ):
            with pytest.raises(SimulatorError, match="is not a simulated tree"):
                change(root)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# What a reader sees.


def test_only_changed_files_are_written(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "warboy=1")
    apply_fault(root, "npu0", "idle")
    inodes = {path: path.stat().st_ino for path in (root / "sys").rglob("*") if path.is_file()}
    tick(root)
    written = {path.name for path, inode in inodes.items() if path.stat().st_ino != inode}
    assert written == {"heartbeat"}


# Keeping it alive.


async def test_a_simulation_moves_and_faults_stay_until_ok(root: Path) -> None:

    def ticks() -> int:
        return cards(root)[0].telemetry.ticks

    async def some_ticks() -> None:
        goal = ticks() + 3
        await asyncio.to_thread(wait_until, lambda: ticks() >= goal)

    running = asyncio.create_task(simulate(root, interval=0.001))
    await some_ticks()

    apply_fault(root, "npu0", "dead")
    assert (root / liveness(PAIR[0])).read_text(encoding="utf-8") == "0\n"
    await some_ticks()
    assert (root / liveness(PAIR[0])).read_text(encoding="utf-8") == "0\n"
    apply_fault(root, "npu0", "ok")
    await some_ticks()
    assert (root / liveness(PAIR[0])).read_text(encoding="utf-8") == "1\n"

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_load_follows_the_holders(root: Path) -> None:
    held: Feed[Mapping[str, frozenset[int]]] = Feed({})

    def loads() -> list[bool]:
        return [card.telemetry.mean_load > 0 for card in cards(root)]

    running = asyncio.create_task(simulate(root, held, interval=0.001))
    held.publish({PAIR[1].uuid: frozenset({0})})
    await asyncio.to_thread(wait_until, lambda: loads() == [False, True])
    held.publish({PAIR[0].serial: frozenset({0, 1})})  # where two cards report one UUID
    await asyncio.to_thread(wait_until, lambda: loads() == [True, False])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "cards": [{}]}'])
def test_a_state_of_another_version_is_refused_with_words(root: Path, text: str) -> None:
    (root / STATE_DIR / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(SimulatorError, match="cannot be understood"):
        tick(root)
