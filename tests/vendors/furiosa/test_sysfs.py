import errno
import fnmatch
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.core.hardware import Card, CoreRange, CoreReading, Reading
from npu_agent.core.vendor import Entry, NotServedError
from npu_agent.files import SIMULATION
from npu_agent.people import simulator
from npu_agent.people.simulator.cards import card
from npu_agent.people.simulator.tree import tick
from npu_agent.vendors.furiosa import sysfs
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.inventory.helpers import bare_card, management, tree, write


def entry_of(root: Path) -> Entry:
    (entry,) = Furiosa(root).scan()
    return entry


def card_at(pci_bus_id: str | None) -> Card:
    return FAMILIES["warboy"].card(0, product="warboy", pci_bus_id=pci_bus_id)


def named(name: str) -> str:
    """The file whose name has these characters in UTF-8, whatever the locale's encoding."""
    return os.fsdecode(name.encode())


# Damaged trees: whatever a file holds, only the documented errors come out.

WARBOY, RNGD, PCI = (
    "class/npu_mgmt/npu0",
    "class/rngd_mgmt/rngd!npu1",
    "bus/pci/devices/0000:01:00.0",
)
GOOD: dict[str, bytes | str | None] = {
    f"{WARBOY}_mgmt/platform_type": b"FuriosaAI\n",
    f"{WARBOY}_mgmt/device_type": b"Warboy\n",
    f"{WARBOY}_mgmt/busname": b"0000:01:00.0",
    f"{RNGD}mgmt/device_type": b"RNGD\n",
}
FILES = (
    *GOOD,
    *(f"{WARBOY}_mgmt/{name}" for name in ("soc_rev", "dev", "device_sn", "device_uuid")),
    *(f"{WARBOY}_mgmt/{name}" for name in ("version", "alive", "heartbeat", "atr_error")),
    f"{WARBOY}_mgmt/ne_clk_freq_info",
    *(f"{WARBOY}pe{cores}/perf_regs" for cores in ("0", "1", "0-1")),
    *(f"{RNGD}pe{cores}/metrics" for cores in ("0", "1", "0-1")),
    *(f"{RNGD}pe{cores}/alloc_status" for cores in ("0", "1", "0-1", "0-3")),
    *(f"{RNGD}mgmt/{name}" for name in ("pe_occupancy", "npu_clocks")),
    f"{PCI}/numa_node",
    *(f"{PCI}/{name}" for name in ("current_link_speed", "max_link_speed", "aer_dev_fatal")),
    *(f"{PCI}/hwmon/hwmon0/{name}" for name in ("temp1_input", "temp1_label", "power1_average")),
    *(f"{PCI}/hwmon/hwmon0/{name}" for name in ("temp_input", named("in\u0661_input"))),
    f"{PCI}/hwmon/hwmon0/temp9999999999999999999999_input",
)
DIRECTORY, CIRCLE, DANGLING = "a directory", "a link to itself", "a link to nothing"
CONTENT = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([DIRECTORY, CIRCLE, DANGLING, None]),
    st.sampled_from([b"", b"1\n", b"x: 1\n" * 20_000, b"0\n1\n" * 4, b"ne tensor (MHz): 2000\n"]),
    st.sampled_from(
        [
            b"TaskExecutionTime: 0x1\nCycleCount: 0x2\nCycleCountHigh: 0x3\n",
            b"CycleCount: 0x5\nTaskCycleCount: 0x4\n",
            b"dram_capacity: 0x9\ndram_usage: 0x7\n",
        ]
    ),
)


def put(path: Path, content: bytes | str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == DIRECTORY:
        path.mkdir()
    elif content == CIRCLE:
        path.symlink_to(path.name)
    elif content == DANGLING:
        path.symlink_to("nowhere")
    elif isinstance(content, bytes):
        path.write_bytes(content)


@settings(max_examples=100)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FILES, CONTENT)))
def test_damaged_trees_give_values_or_documented_errors(
    files: dict[str, bytes | str | None],
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name, content in {**GOOD, **files}.items():
            put(root / "sys" / name, content)
        host = Furiosa(root)
        for entry in host.scan():
            with suppress(NotServedError, OSError):
                check_card(host.identify(entry))
            with suppress(OSError, ValueError):
                assert host.probe(entry).alive in (True, False, None)
            reading = host.read(entry, card_at("0000:01:00.0"))
            check_reading(reading)
            assert len(reading.cores) <= FAMILIES[entry.family].core_count


def check_card(card: Card) -> None:
    assert card.product in ("warboy", "warboyB0", "rngd")
    for text in (card.uuid, card.serial, card.pci_bus_id, card.dev, card.driver_version):
        assert text is None or (text and text.isprintable())
    assert card.numa_node is None or card.numa_node >= 0


def check_reading(reading: Reading) -> None:
    assert reading.alive in (True, False, None)
    assert reading.uptime is None or reading.uptime >= 0
    assert len(reading.errors) <= 256
    assert all(sensor.label for sensor in reading.sensors)
    for highest in (reading.temperature(), reading.power()):
        assert highest is None or isinstance(highest, float)
    assert [core.core for core in reading.cores] == sorted(core.core for core in reading.cores)
    for core in reading.cores:
        assert core.utilization in (None, 0.0)
        assert (core.cycles is None) == (core.task_cycles is None) == (core.source is None)
        assert core.source is None or core.core in core.source


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1)))
def test_only_management_entries_are_entries(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "sys/class/npu_mgmt"
        for name in map(named, (*names, "npu7_mgmt")):
            if len(os.fsencode(name)) < 200 and name not in (".", ".."):
                (directory / name).mkdir(parents=True, exist_ok=True)
        assert [entry.name for entry in Furiosa(Path(temporary)).scan()] == ["npu7"]


# Entries.


def test_two_names_of_one_card_come_in_the_same_order_each_time(tmp_path: Path) -> None:
    """A later one stands for the card, so it must not depend on the order of a listing."""
    names = [f"rngd!npu{index}{end}" for index in range(8) for end in ("_mgmt", "mgmt")]
    for name in reversed(names):
        (tmp_path / "sys/class/rngd_mgmt" / name).mkdir(parents=True)
    assert [Path(entry.path).name for entry in Furiosa(tmp_path).scan()] == names


def test_an_entry_that_is_unbound_meanwhile_is_none(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=2")
    shutil.rmtree(management(root, 0))  # the link in /sys/class still stands
    assert [entry.name for entry in Furiosa(root).scan()] == ["npu1"]


def test_a_link_is_as_fast_as_the_slower_of_its_two_ends(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    device = (root / "sys/bus/pci/devices" / card("rngd", 0).pci_bus_id).resolve()
    bridge, host = device.parent, Furiosa(root)

    def link() -> tuple[object, object]:
        found = host.identify(entry_of(root))
        return found.lanes, found.link_speed

    assert link() == ((16, 16), (32.0, 32.0))
    write(device / "current_link_speed", "16.0 GT/s PCIe\n")
    assert link() == ((16, 16), (16.0, 32.0))
    write(bridge / "max_link_speed", "16.0 GT/s PCIe\n")
    write(bridge / "max_link_width", "8\n")
    assert link() == ((16, 8), (16.0, 16.0))
    write(device / "current_link_speed", "Unknown\n")
    assert link() == ((16, 8), None)


@pytest.mark.parametrize("name", ["warboy", "rngd"])
def test_the_kernel_counts_errors_on_the_bus(name: str, tmp_path: Path) -> None:
    root = tree(tmp_path / "host", f"{name}=1")
    entry, host = entry_of(root), Furiosa(root)
    simulator.apply_fault(root, "npu0", "bus-errors")
    tick(root)
    errors = dict(host.read(entry, host.identify(entry)).errors)
    assert errors["aer_nonfatal"] > errors["aer_fatal"] == 0
    write(root / "sys/bus/pci/devices" / card(name, 0).pci_bus_id / "aer_dev_fatal", None)
    assert "aer_fatal" not in dict(host.read(entry, host.identify(entry)).errors)


def test_the_addresses_of_cards_that_are_not_served_too(tmp_path: Path) -> None:
    simulator.make(tmp_path, simulator.parse_cards("warboy=2,rngd=1"), plain_nodes=True)
    (tmp_path / "sys/class/npu_mgmt/npu1_mgmt/device_type").write_text(
        "Frobnicator\n", encoding="utf-8"
    )
    (tmp_path / "sys/class/rngd_mgmt/rngd!npu2mgmt/busname").write_text(
        "somewhere\n", encoding="utf-8"
    )
    expected = {card("warboy", index).pci_bus_id for index in range(2)}
    assert Furiosa(tmp_path).pci_addresses() == expected


def test_cards_of_a_containers_view(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    assert Furiosa(tmp_path).given() == ()
    (dev / "rngd").mkdir(parents=True)
    for name in ("npu3pe1", "npu3ch0", "npu12_mgmt", "npu7x", "npux", "null", "rngd/npu3bar0"):
        (dev / name).touch()
    found = {(card.family, card.index): card.nodes for card in Furiosa(tmp_path).given()}
    assert found == {
        ("warboy", 3): {"npu3pe1", "npu3ch0"},
        ("warboy", 12): {"npu12_mgmt"},
        ("rngd", 3): {"rngd/npu3bar0"},
    }


def test_a_driver_that_is_reloaded_makes_another_entry(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    before = entry_of(root)
    # Side by side, so that the file system cannot give the new one the inode of the old one.
    fresh = tmp_path / "fresh"
    shutil.copytree(management(root, 0), fresh)
    shutil.rmtree(management(root, 0))
    fresh.rename(management(root, 0))
    after = entry_of(root)
    assert (after.key, after.path) == (before.key, before.path)
    assert after.inode != before.inode


# What cannot be read.


def test_no_file_stays_open(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    (management(root, 0) / "alive").unlink()
    (management(root, 0) / "alive").mkdir()
    host, entry = Furiosa(root), entry_of(root)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        host.identify(entry)
        host.read(entry, card_at("0000:01:00.0"))
        with pytest.raises(OSError, match="directory"):
            host.probe(entry)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Device nodes.


@pytest.mark.parametrize(("simulated", "plain"), [(True, {"npu0"}), (False, set())])
def test_only_devices_are_nodes_and_in_a_simulated_tree_their_plain_stand_ins(
    tmp_path: Path, simulated: bool, plain: set[str]
) -> None:
    bare_card(tmp_path, 0, "U")
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "npu0").touch()
    (dev / "npu0pe0").mkdir()
    (dev / "npu0pe1").symlink_to("nowhere")
    (dev / "npu0pe0-1").symlink_to(os.devnull)
    os.mkfifo(dev / "npu0ch0")
    (dev / "npu1").touch()
    if simulated:
        (tmp_path / SIMULATION).mkdir()
    host, entry = Furiosa(tmp_path), entry_of(tmp_path)
    assert host.identify(entry).nodes == host.probe(entry).nodes == {"npu0pe0-1", *plain}


# Telemetry.


def test_sensors_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    bare_card(tmp_path, 0, "U")
    sensors = tmp_path / "sys/bus/pci/devices/0000:01:00.0/hwmon/hwmon3"
    sensors.mkdir(parents=True)
    for name, content in {
        "temp10_input": "10\n",
        "temp2_input": "-2\n",
        "temp2_label": "Board\n",
        "temp2_max": "99\n",
        "power1_average": "1370000\n",
        "power1_input": "5\n",
        "power2_average": "-1\n",
        "power3_average": "18446744073709551615\n",
        "power4_average": "2000000001\n",
        "power5_average": "900000\n",
        "in0_input": "12000\n",
        "curr1_input": "114\n",
        "temp3_input": "warm\n",
    }.items():
        (sensors / name).write_text(content, encoding="utf-8")
    reading = Furiosa(tmp_path).read(entry_of(tmp_path), card_at("0000:01:00.0"))
    assert [(s.kind.value, s.label, s.value) for s in reading.sensors] == [
        ("mA", "1", 114),
        ("mV", "0", 12000),
        ("µW", "1", 1370000),
        ("µW", "5", 900000),
        ("m°C", "Board", -2),
        ("m°C", "10", 10),
    ]
    assert (reading.temperature(), reading.power()) == (0.01, 1.37)


# Cores.


def core_file(root: Path, index: int, cores: str, name: str, family: str = "warboy") -> Path:
    prefix = "rngd!" if family == "rngd" else ""
    return management(root, index, family).parent / f"{prefix}npu{index}pe{cores}" / name


def registers(cycles: int, task_cycles: int) -> str:
    return f"TaskExecutionTime: {task_cycles:#x}\nCycleCount: {cycles:#x}\nCycleCountHigh: 0x0\n"


def metrics(cycles: int, task_cycles: int) -> str:
    return f"CycleCount: {cycles:#x}\nTaskCycleCount: {task_cycles:#x}\n"


def counted(core: CoreReading) -> tuple[object, ...]:
    return core.core, core.utilization, core.cycles, core.task_cycles, str(core.source or "")


@pytest.mark.parametrize(
    ("single", "other", "fused", "found"),
    [
        ("", "", "", [(0, 0.0, None, None, ""), (1, 0.0, None, None, "")]),
        ("", "", registers(9, 5), [(0, None, 9, 5, "0-1"), (1, None, 9, 5, "0-1")]),
        (registers(9, 5), "", "", [(0, None, 9, 5, "0"), (1, 0.0, None, None, "")]),
        (
            registers(9, 5),
            registers(8, 4),
            registers(7, 3),
            [(0, None, 9, 5, "0"), (1, None, 8, 4, "1")],
        ),
        # Of a core of which one entry tells nonsense it is not known whether it is free.
        (b"\xff\0", "", "", [(1, 0.0, None, None, "")]),
        ("", "", "Task", []),
        (b"\xff", "", registers(9, 5), [(0, None, 9, 5, "0-1"), (1, None, 9, 5, "0-1")]),
        # Entries that are not there tell nothing.
        (None, None, "", [(0, 0.0, None, None, ""), (1, 0.0, None, None, "")]),
        (None, None, None, []),
    ],
)
def test_a_core_has_the_counters_of_the_entry_in_use_that_covers_it(
    tmp_path: Path,
    single: bytes | str | None,
    other: bytes | str | None,
    fused: bytes | str | None,
    found: list[tuple[object, ...]],
) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    for cores, content in (("0", single), ("1", other), ("0-1", fused)):
        write(core_file(root, 0, cores, "perf_regs"), content)
    assert list(map(counted, Furiosa(root).read_cores(entry_of(root)))) == found


def test_a_core_that_refuses_is_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    write(core_file(root, 0, "0", "perf_regs"), registers(1, 1))
    entry, real = entry_of(root), os.open
    refused = str(root / "sys/class/npu_mgmt/npu0pe0/perf_regs")

    def refuse(path: str, flags: int) -> int:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    cores = Furiosa(root).read_cores(entry)
    assert list(map(counted, cores)) == [(0, 0.0, None, None, ""), (1, 0.0, None, None, "")]


def test_fused_cores_of_an_rngd_share_their_memory_and_counters(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    beside = management(root, 0, "rngd").parent / "rngd!npu0pe0-3"
    beside.mkdir()
    (beside / "alloc_status").write_text(
        "dram_capacity: 0x600000000\ndram_usage: 0x100000000\n", encoding="utf-8"
    )
    (beside / "metrics").write_text(metrics(100, 60), encoding="utf-8")
    (root / "sys/class/rngd_mgmt/rngd!npu0pe0-3").symlink_to(beside)
    occupied = management(root, 0, "rngd") / "pe_occupancy"
    for content in ("1\n1\n1\n1\n0\n0\n0\n0\n", None):  # an old driver has no such file
        write(occupied, content)
        cores = Furiosa(root).read_cores(entry_of(root))
        for core in cores[:4]:
            assert counted(core) == (core.core, None, 100, 60, "0-3")
            assert (core.dram_total, core.dram_used) == (6 << 30, 1 << 30)
        for core in cores[4:]:
            assert (core.utilization, core.source) == (0.0, CoreRange(core.core, core.core))


@pytest.mark.parametrize(
    ("occupied", "memory", "utilization"),
    [
        ("0\n" * 8, "dram_capacity: 0x2\ndram_usage: 0x1\n", 0.0),
        ("1\n" * 8, "", None),
        ("7\n" * 8, "", 0.0),
        ("0\n", "", 0.0),
        (None, "", 0.0),
        (None, "nonsense", None),
        (None, None, None),
    ],
)
def test_sources_that_say_that_a_core_of_an_rngd_is_free(
    tmp_path: Path, occupied: str | None, memory: str | None, utilization: float | None
) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    write(management(root, 0, "rngd") / "pe_occupancy", occupied)
    write(core_file(root, 0, "0", "alloc_status", "rngd"), memory)
    write(core_file(root, 0, "0", "metrics", "rngd"), metrics(9, 5))
    core = Furiosa(root).read_cores(entry_of(root))[0]
    assert (core.utilization, core.cycles, core.task_cycles) == (utilization, 9, 5)


# Limits of our own.

CALLS = ("open", "read", "stat", "lstat", "readlink", "listdir", "scandir")
VERBS: dict[str, Callable[[Furiosa, Entry], object]] = {
    "scan": lambda host, _: host.scan(),
    "identify": lambda host, entry: host.identify(entry),
    "probe": lambda host, entry: host.probe(entry),
    "read": lambda host, entry: host.read(entry, host.identify(entry)),
    "read_cores": lambda host, entry: host.read_cores(entry),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("family", ["warboy", "rngd"])
def test_no_system_call_that_fails_for_our_own_limits_is_taken_for_something_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, verb: str
) -> None:
    """Whichever it is of all that a verb makes, stats of nodes in /dev included."""
    root = tree(tmp_path, f"{family}=1")
    entry = entry_of(root)
    limits = itertools.cycle([errno.EMFILE, errno.ENFILE, errno.ENOMEM])
    made = itertools.count()
    failing: int | None = None
    with monkeypatch.context() as patched:
        for name in CALLS:
            call = getattr(os, name)

            def limited(
                *args: object, call: Callable[..., object] = call, **named: object
            ) -> object:
                if next(made) == failing:
                    number = next(limits)
                    raise OSError(number, os.strerror(number))
                return call(*args, **named)

            patched.setattr(os, name, limited)
        VERBS[verb](Furiosa(root), entry)
        count = next(made)
        assert count > 2
        for failing in range(count):  # noqa: B007 (read above)
            made = itertools.count()
            with pytest.raises(OSError, match=r"Too many open files|allocate memory"):
                VERBS[verb](Furiosa(root), entry)


def test_the_profile_names_each_driver_file_that_is_read_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`npu-agent record` asks people to look into the others."""
    read: set[str] = set()

    def noted(path: str) -> bytes | None:
        if "/devices/pci" not in os.path.realpath(path) or "/hwmon/" in path:
            read.add(Path(path).name)
        return real_read(path)

    real_read = sysfs._read
    monkeypatch.setattr(sysfs, "_read", noted)
    furiosa = Furiosa(tree(tmp_path, "warboy=1,rngd=1"))
    # No core is known to be free: so the memory of its user is read.
    write(management(tmp_path, 1, "rngd") / "pe_occupancy", None)
    for entry in furiosa.scan():
        furiosa.probe(entry)
        furiosa.read(entry, furiosa.identify(entry))
    files = Furiosa.profile.files
    identities = {*Furiosa.profile.identities}
    assert read == {name for file in files for name in fnmatch.filter(read, file)}
    assert {file for file in files if not fnmatch.filter(read, file)} <= identities
