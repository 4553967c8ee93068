import os
import stat
import threading
from pathlib import Path

import pytest

from npu_agent.people.simulator import FAULTS, apply_fault, cards, make
from npu_agent.people.simulator.cards import card
from npu_agent.people.simulator.driver import liveness, management
from npu_agent.people.simulator.tree import tick
from tests.until import wait_until

from .helpers import listing

SPECS = (card("warboy", 0), card("rngd", 1))
# These have tests of their own: what was counted stays counted, another card stays, heat fades.
LEAVES_TRACES = {"errors", "swap", "twin", "reset", "busy", "busy-one", "idle", "ok", "back"}
both = pytest.mark.parametrize("index", [0, 1], ids=["warboy", "rngd"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path / "root", SPECS, plain_nodes=True)
    return tmp_path / "root"


def alive(root: Path, index: int) -> str:
    return (root / liveness(SPECS[index])).read_text(encoding="utf-8")


@both
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - LEAVES_TRACES))
def test_every_fault_is_seen_at_once_on_its_card_alone_and_ok_undoes_it(
    root: Path, index: int, fault: str
) -> None:
    name, other = SPECS[index].name, SPECS[1 - index].name
    before = listing(root)

    apply_fault(root, name, fault)
    changed = set(listing(root).splitlines()) ^ set(before.splitlines())
    assert changed
    assert not [line for line in changed if other in line or f"hwmon{1 - index}/" in line]

    apply_fault(root, name, "ok")
    assert cards(root)[index].faults == ()
    assert listing(root) == before


def test_errors_rise_with_each_step(root: Path) -> None:
    def count() -> int:
        text = (root / management(SPECS[0]) / "atr_error").read_text(encoding="utf-8")
        return int(text.split("Device Error: ")[1])

    found = [count()]
    apply_fault(root, "npu0", "errors")
    for _ in range(3):
        found.append(count())
        tick(root)
    assert found == [0, 1, 2, 3]

    apply_fault(root, "npu0", "ok")
    stays = count()
    tick(root)
    assert count() == stays


def test_flap_alternates(root: Path) -> None:
    apply_fault(root, "npu1", "flap")
    found = []
    for _ in range(4):
        found.append(alive(root, 1))
        tick(root)
    assert found == ["0\n", "1\n", "0\n", "1\n"]


@both
@pytest.mark.parametrize("end", ["ok", "gone", "garbage"])
def test_hang_blocks_a_reader_until_it_ends(root: Path, index: int, end: str) -> None:
    name, path = SPECS[index].name, root / liveness(SPECS[index])
    apply_fault(root, name, "hang")
    tick(root)
    assert stat.S_ISFIFO(path.lstat().st_mode)

    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(path.read_bytes()), daemon=True)
    reader.start()
    descriptors = []

    def reader_waits() -> bool:
        # To open a pipe for writing without waiting is refused unless somebody reads.
        try:
            descriptors.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    wait_until(reader_waits)
    assert answers == []
    apply_fault(root, name, end)
    os.close(descriptors[0])
    reader.join(20)
    assert answers == [b""]
    if end == "ok":
        assert alive(root, index) == "1\n"


@both
def test_gone_leaves_nothing_and_back_brings_all(root: Path, index: int) -> None:
    name = SPECS[index].name
    before = listing(root)
    apply_fault(root, name, "gone")
    left = [line for line in listing(root).splitlines() if name in line or f"hwmon{index}" in line]
    assert left == []
    assert not (root / "sys/bus/pci/devices" / SPECS[index].pci_bus_id).is_symlink()
    assert (root / "sys/class/npu_mgmt").is_dir()
    assert (root / "sys/class/rngd_mgmt").is_dir()  # the driver is still loaded

    apply_fault(root, name, "back")
    assert listing(root) == before


def test_faults_add_up_and_ok_ends_them_all(root: Path) -> None:
    for fault in ("dead", "no-node", "dead"):
        apply_fault(root, "npu0", fault)
    assert cards(root)[0].faults == ("no-node", "dead")
    assert alive(root, 0) == "0\n"
    assert not (root / "dev/npu0pe0").exists()
    apply_fault(root, "npu0", "ok")
    assert alive(root, 0) == "1\n"
    assert (root / "dev/npu0pe0").exists()


def test_swap_is_another_card_in_the_same_place(root: Path) -> None:
    apply_fault(root, "npu0", "swap")

    directory = root / "sys/class/npu_mgmt/npu0_mgmt"
    assert (directory / "device_uuid").read_text(encoding="utf-8") != f"{SPECS[0].uuid}\n"
    assert (directory / "device_sn").read_text(encoding="utf-8") != SPECS[0].serial
    assert (directory / "busname").read_text(encoding="utf-8") == SPECS[0].pci_bus_id
    tick(root)
    assert (directory / "device_uuid").read_text(
        encoding="utf-8"
    ) == f"{cards(root)[0].spec.uuid}\n"


@both
def test_reset_begins_all_counters_anew_under_the_same_load(root: Path, index: int) -> None:
    name = SPECS[index].name
    apply_fault(root, name, "busy")
    tick(root)
    before = cards(root)[index].telemetry
    apply_fault(root, name, "reset")
    after = cards(root)[index].telemetry
    assert (set(after.cycles), set(after.task_cycles), after.uptime) == ({0}, {0}, 0.0)
    assert (after.load, after.temperature) == (before.load, before.temperature)
    assert (root / management(SPECS[index]) / "heartbeat").read_text(encoding="utf-8") == "0\n"


def test_a_card_has_several_names(root: Path) -> None:
    apply_fault(root, SPECS[0].pci_bus_id, "dead")
    apply_fault(root, SPECS[1].uuid, "dead")
    assert [found.faults for found in cards(root)] == [("dead",), ("dead",)]


def test_unknown_names_are_refused_with_a_suggestion(root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown fault 'daed'; did you mean 'dead'\? \(there are"
    ):
        apply_fault(root, "npu0", "daed")
    with pytest.raises(ValueError, match=r"no card 'npu9'.*there are: npu0, npu1"):
        apply_fault(root, "npu9", "dead")
