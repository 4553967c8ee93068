import asyncio
import json
import os
import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from npu_agent.simulator import (
    Simulation,
    SimulatorError,
    apply_fault,
    card,
    cards,
    living,
    make,
    parse_cards,
    tick,
    tree,
)
from npu_agent.simulator.furiosa.driver import core, liveness, management, nodes
from npu_agent.simulator.tree import STATE_DIR
from tests.until import wait_until

from .helpers import listing

GOLDEN = Path(__file__).parent / "golden"
PAIR = parse_cards("warboy=1,rngd=1")


def made(path: Path, text: str = "warboy=1,rngd=1") -> Path:
    make(path, parse_cards(text), plain_nodes=True)
    return path


def test_a_fresh_tree_is_the_golden_one(tmp_path: Path) -> None:
    """To write it anew after a wanted change: UPDATE_GOLDEN=1 pytest tests/simulator."""
    found = listing(made(tmp_path / "root"))
    golden = GOLDEN / "warboy=1,rngd=1.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_two_runs_give_the_same_tree_and_the_same_life(tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    for _ in range(5):
        tick(first, 7.0)
        tick(second, 7.0)
    assert listing(first) == listing(second)
    assert listing(first) != (GOLDEN / "warboy=1,rngd=1.txt").read_text()


def test_links_lead_to_files_below_the_root_wherever_it_is_moved(tmp_path: Path) -> None:
    root = made(tmp_path / "root").rename(tmp_path / "moved")
    for path in root.rglob("*"):
        if path.is_symlink():
            assert path.exists(), path
            assert root in path.resolve().parents
    device = (root / "sys/bus/pci/devices/0000:01:00.0").resolve().relative_to(root)
    assert device.parts[:3] == ("sys", "devices", "pci0000:00")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make device nodes")
def test_nodes_are_character_devices_for_root(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "probe", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("not even root may make device nodes here")
    make(tmp_path / "root", PAIR)
    for spec in PAIR:
        for path in nodes(spec):
            found = (tmp_path / "root" / path).stat()
            assert stat.S_ISCHR(found.st_mode)
            assert found.st_rdev == os.makedev(1, 3)
            assert stat.S_IMODE(found.st_mode) == 0o666


def test_nodes_are_plain_files_where_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refused)
    make(tmp_path / "root", PAIR)
    for spec in PAIR:
        for path in nodes(spec):
            found = (tmp_path / "root" / path).stat()
            assert stat.S_ISREG(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o666


def test_plain_nodes_stay_plain_when_a_card_returns(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    apply_fault(root, "npu0", "gone")
    apply_fault(root, "npu0", "back")
    assert stat.S_ISREG((root / "dev/npu0").stat().st_mode)


def test_a_strict_umask_does_not_lock_the_agent_out(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        root = made(tmp_path / "root")
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE((root / liveness(PAIR[0])).stat().st_mode) == 0o444


def test_making_it_again_changes_nothing_and_mends_what_differs(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    before = listing(root)
    inode = (root / liveness(PAIR[0])).stat().st_ino
    made(root)
    assert listing(root) == before
    assert (root / liveness(PAIR[0])).stat().st_ino == inode  # not even written

    (root / "dev/npu0pe0").unlink()
    (root / liveness(PAIR[0])).unlink()
    (root / "sys/class/npu_mgmt/npu0_mgmt").unlink()
    made(root)
    assert listing(root) == before


def test_cards_are_added_and_taken_while_the_others_keep_their_state(tmp_path: Path) -> None:
    root = made(tmp_path / "root", "warboy=1")
    apply_fault(root, "npu0", "dead")
    tick(root)
    telemetry = cards(root)[0].telemetry
    made(root, "warboy=2,rngd=1")
    assert [found.spec.name for found in cards(root)] == ["npu0", "npu1", "npu2"]
    assert cards(root)[0].telemetry == telemetry
    assert cards(root)[0].faults == ("dead",)

    make(root, [found.spec for found in cards(root)[1:]], plain_nodes=True)
    assert [found.spec.name for found in cards(root)] == ["npu1", "npu2"]
    assert "npu0" not in listing(root)
    made(root, "warboy=0")
    assert not [line for line in listing(root).splitlines() if "npu1" in line or "npu2" in line]


def test_a_card_may_be_given_another_identity_and_place(tmp_path: Path) -> None:
    odd = replace(PAIR[0], uuid="", numa_node=-1, pci_bus_id="0001:6d:00.0", pci_path="pci0001:6c")
    make(tmp_path / "root", [odd], plain_nodes=True)
    device = tmp_path / "root/sys/bus/pci/devices/0001:6d:00.0"
    assert (device / "numa_node").read_text() == "-1\n"
    make(tmp_path / "root", [PAIR[0]], plain_nodes=True)
    assert listing(tmp_path / "root") == listing(made(tmp_path / "other", "warboy=1"))


def test_two_cards_cannot_have_the_same_number_or_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same name: npu0"):
        make(tmp_path / "root", [PAIR[0], card("rngd", 0)])
    with pytest.raises(ValueError, match=r"same pci_bus_id: 0000:01:00\.0"):
        make(tmp_path / "root", [PAIR[0], replace(PAIR[1], pci_bus_id="0000:01:00.0")])
    assert not (tmp_path / "root").exists()


# Which ROOT is accepted.


@pytest.fixture
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the guard lets through, no test writes to this host: root could."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it would have written")

    for writes in ("_mkdir", "_Tree"):
        monkeypatch.setattr(tree, writes, refuse)


@pytest.mark.usefixtures("nothing_is_written")
def test_the_fixture_stops_what_would_be_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="would have written"):
        make(tmp_path / "root", PAIR)
    assert not (tmp_path / "root").exists()


@pytest.mark.usefixtures("nothing_is_written")
def test_the_hosts_own_root_is_refused_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    for root in (Path("/"), Path("/sys/.."), tmp_path / "link"):
        with pytest.raises(SimulatorError, match="this host itself"):
            make(root, PAIR)
    assert not Path("/", STATE_DIR).exists()


@pytest.mark.parametrize("name", ["file", "sys/class", "dev/null", "etc/hosts"])
def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    before = listing(tmp_path)
    with pytest.raises(SimulatorError, match="not empty"):
        make(tmp_path, PAIR)
    assert listing(tmp_path) == before
    assert not (tmp_path / STATE_DIR).exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("precious")
    with pytest.raises(SimulatorError, match="not a directory"):
        make(tmp_path / "root", PAIR)


def test_empty_directories_may_be_there(tmp_path: Path) -> None:
    for name in ("dev", "sys", "var"):
        (tmp_path / "root" / name).mkdir(parents=True)
    made(tmp_path / "root")
    assert (tmp_path / "root/dev/npu0").exists()
    assert (tmp_path / "root/var").is_dir()


def test_a_link_as_dev_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/dev").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SimulatorError, match="not empty"):
        make(tmp_path / "root", PAIR)

    (tmp_path / "root/dev").unlink()
    made(tmp_path / "root", "warboy=0")
    (tmp_path / "root/dev").rmdir()
    (tmp_path / "root/dev").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SimulatorError, match="symbolic link"):
        made(tmp_path / "root")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(("says", "name"), [("is_mount", "dev"), ("is_char_device", "null")])
def test_what_is_in_a_dev_that_is_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, name: str
) -> None:
    monkeypatch.setattr(Path, says, lambda path: path.name == name)
    dev = tmp_path / "root/dev"
    (dev / "shm").mkdir(parents=True)
    (dev / "null").write_text("")
    root = made(tmp_path / "root")
    assert (dev / "npu0").exists()
    make(root, ())
    assert sorted(path.name for path in dev.iterdir()) == ["null", "shm"]


def test_a_node_of_somebody_else_is_never_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "dev")
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/npu0").write_text("a real one")
    with pytest.raises(SimulatorError, match="did not make it"):
        made(tmp_path / "root")
    assert not (tmp_path / "root/sys").exists()
    assert (tmp_path / "root/dev/npu0").read_text() == "a real one"

    (tmp_path / "root/dev/npu0").unlink()
    made(tmp_path / "root")  # a first attempt that failed is no obstacle


def test_only_a_simulated_tree_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        for change in (
            lambda root: apply_fault(root, "npu0", "dead"),
            tick,
            cards,
        ):
            with pytest.raises(SimulatorError, match="is not a simulated tree"):
                change(root)
        assert not living(root)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "cards": [{}]}'])
def test_a_state_of_another_version_is_refused_with_words(tmp_path: Path, text: str) -> None:
    root = made(tmp_path / "root")
    (root / STATE_DIR / "state.json").write_text(text)
    with pytest.raises(SimulatorError, match="cannot be understood"):
        tick(root)


def test_an_interrupted_making_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def fail_in_the_middle(path: Path, *, plain: bool) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(28, "No space left on device", str(path))
        assert plain
        path.touch()

    with monkeypatch.context() as patched:
        patched.setattr(tree, "_make_node", fail_in_the_middle)
        with pytest.raises(SimulatorError, match="No space left on device"):
            made(tmp_path / "root")
    made(tmp_path / "root")
    assert listing(tmp_path / "root") == listing(made(tmp_path / "other"))


# What a reader sees.


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    apply_fault(root, "npu0", "busy")
    shapes = {
        root / management(PAIR[0]) / "atr_error": ("AXI Post Error: ", 9),
        root / management(PAIR[0]) / "heartbeat": ("", 1),
        root / core(PAIR[0], "0-1") / "perf_regs": ("ProgramCounter: ", 8),
        root / "sys/class/rngd_mgmt/rngd!npu1mgmt/pe_occupancy": ("", 8),
    }
    names = {path.name for path in (root / management(PAIR[0])).iterdir()}
    stop, started, seen = threading.Event(), threading.Event(), list[str]()

    def read() -> None:
        while not stop.is_set():
            for path, (start, lines) in shapes.items():
                text = path.read_text()
                if not (text.startswith(start) and text.count("\n") == lines and text[-1] == "\n"):
                    seen.append(f"{path}: {text!r}")
            found = {path.name for path in (root / management(PAIR[0])).iterdir()}
            seen.extend(found - names)
            started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert started.wait(20)
    for _ in range(40):
        tick(root)
    stop.set()
    reader.join(20)
    assert seen == []


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    root = made(tmp_path / "root", "warboy=1")
    apply_fault(root, "npu0", "idle")
    inodes = {path: path.stat().st_ino for path in (root / "sys").rglob("*") if path.is_file()}
    tick(root)
    written = {path.name for path, inode in inodes.items() if path.stat().st_ino != inode}
    assert written == {"heartbeat"}


def test_a_card_is_never_listed_without_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "root", "warboy=1")
    link = root / "sys/class/npu_mgmt/npu0_mgmt"
    steps: list[tuple[bool, bool]] = []

    def watch(name: str) -> None:
        before = getattr(tree._Tree, name)

        def step(self: object, *args: object) -> None:
            before(self, *args)
            steps.append((link.is_symlink(), (link.resolve() / "device_uuid").exists()))

        monkeypatch.setattr(tree._Tree, name, step)

    for name in ("_put", "_remove"):
        watch(name)
    apply_fault(root, "npu0", "gone")
    assert steps[-1] == (False, False)
    apply_fault(root, "npu0", "back")
    assert steps[-1] == (True, True)
    assert (True, False) not in steps


def test_a_swapped_card_is_out_before_the_other_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "root", "warboy=1")
    link, entry = root / "sys/class/npu_mgmt/npu0_mgmt", root / management(PAIR[0])
    before, put = cards(root)[0].spec, tree._Tree._put
    listed: list[set[str]] = []

    def watch(self: tree._Tree, path: str, content: object) -> None:
        put(self, path, content)  # type: ignore[arg-type]
        files = [entry / name for name in ("device_uuid", "device_sn")]
        there = {file.read_text().strip() for file in files if file.exists()}
        listed.append(there if link.is_symlink() else set())

    monkeypatch.setattr(tree._Tree, "_put", watch)
    apply_fault(root, "npu0", "swap")
    after = cards(root)[0].spec
    assert listed[-1] == {after.uuid, after.serial}
    assert not any({before.uuid, before.serial} & there for there in listed)


def test_the_place_of_a_card_that_was_taken_is_not_ours_any_more(tmp_path: Path) -> None:
    root = made(tmp_path / "root", "warboy=2")
    made(root, "warboy=1")
    (root / "dev/npu1").write_text("precious")
    with pytest.raises(SimulatorError, match="did not make it"):
        made(root, "warboy=2")
    assert (root / "dev/npu1").read_text() == "precious"


# Keeping it alive.


async def test_a_simulation_moves_and_faults_stay_until_ok(tmp_path: Path) -> None:
    root = made(tmp_path / "root")

    def ticks() -> int:
        return cards(root)[0].telemetry.ticks

    async def some_ticks() -> None:
        goal = ticks() + 3
        await asyncio.to_thread(wait_until, lambda: ticks() >= goal)

    running = asyncio.create_task(Simulation(root, interval=0.001).run())
    await some_ticks()
    assert living(root)

    apply_fault(root, "npu0", "dead")
    assert (root / liveness(PAIR[0])).read_text() == "0\n"
    await some_ticks()
    assert (root / liveness(PAIR[0])).read_text() == "0\n"
    apply_fault(root, "npu1", "gone")
    await some_ticks()
    assert not (root / liveness(PAIR[1])).exists()

    with pytest.raises(
        SimulatorError, match=rf"another simulator already \(process {os.getpid()}\)"
    ):
        await asyncio.wait_for(Simulation(root).run(), 20)

    apply_fault(root, "npu0", "ok")
    apply_fault(root, "npu1", "back")
    await some_ticks()
    assert (root / liveness(PAIR[0])).read_text() == "1\n"
    assert (root / liveness(PAIR[1])).read_text() == "1\n"

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not living(root)


def ticked(root: Path, before: int) -> bool:
    return cards(root)[0].telemetry.ticks > before


async def test_a_simulation_may_follow_another(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    for _ in range(2):
        running = asyncio.create_task(Simulation(root, interval=0.001).run())
        before = cards(root)[0].telemetry.ticks
        await asyncio.to_thread(wait_until, partial(ticked, root, before))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_simulation_ends_with_words_when_its_tree_vanishes(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    running = asyncio.create_task(Simulation(root, interval=0.001).run())
    await asyncio.to_thread(wait_until, lambda: living(root))
    with tree._locked(root):  # not in the middle of a step, which would write it again
        (root / STATE_DIR / "state.json").unlink()
    with pytest.raises(SimulatorError, match="not a simulated tree"):
        await asyncio.wait_for(running, 20)
    assert not (root / STATE_DIR / "state.json").exists()


async def test_a_simulation_that_is_cancelled_writes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path / "root")
    began, goes_on, ended = (threading.Event() for _ in range(3))

    def step(*_: object) -> None:
        began.set()
        goes_on.wait(20)
        ended.set()

    monkeypatch.setattr(Simulation, "_step", step)
    running = asyncio.create_task(Simulation(root, interval=0.001).run())
    await asyncio.to_thread(began.wait, 20)
    running.cancel()
    asyncio.get_running_loop().call_later(0.01, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_only_a_made_tree_is_kept_alive(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="not a simulated tree"):
        await Simulation(tmp_path).run()
    assert listing(tmp_path) == "\n"


async def test_a_file_changed_by_hand_stays_until_a_fault_or_make(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    simulation = Simulation(root)
    simulation._step(1.0)
    path = root / liveness(PAIR[0])
    path.unlink()
    path.write_text("7\n")
    simulation._step(1.0)
    assert path.read_text() == "7\n"
    apply_fault(root, "npu0", "ok")
    assert path.read_text() == "1\n"


def test_the_state_is_plain_json(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    apply_fault(root, "npu0", "hot")
    state = json.loads((root / STATE_DIR / "state.json").read_text())
    assert [entry["faults"] for entry in state["cards"]] == [["hot"], []]
