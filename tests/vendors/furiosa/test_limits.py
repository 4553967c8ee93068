"""What the driver of RNGD says of limits, throttling, memory and types, and what it leaves out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from npu_agent.core.hardware import Limits, Reading
from npu_agent.core.vendor import NotServedError
from npu_agent.people import simulator
from npu_agent.people.doctor.host import on_the_bus
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.inventory.helpers import management, tree, write

HEALTHY = Limits(power=300.0, default_power=300.0, clock=2147, slowdown=80.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "host", "rngd=1")


def read(root: Path) -> Reading:
    host = Furiosa(root)
    [entry] = host.scan()
    return host.read(entry, host.identify(entry))


def test_the_slow_card_says_why(root: Path) -> None:
    reading = read(root)
    assert (reading.throttle, reading.limits, reading.error_text) == ((), HEALTHY, "0x00000000")
    assert [name for name, _ in reading.errors] == ["aer_fatal", "aer_nonfatal"], "the kernel's"
    simulator.apply_fault(root, "npu0", "slow")
    reading = read(root)
    assert reading.throttle == ("app_power_cap",)
    assert reading.limits.power == 225.0
    assert {core.frequency for core in reading.cores} == {1700}
    assert Furiosa(root).probe(Furiosa(root).scan()[0]).alive, "it is as healthy as its siblings"


def test_files_that_vanish_one_by_one_take_no_others_with_them(root: Path) -> None:
    directory = management(root, 0, "rngd")
    gone: dict[str, Callable[[Reading], bool]] = {
        "throttle_reason": lambda it: it.throttle is None,
        "hw_error": lambda it: it.error_text is None,
        "npu_slowdown_temperature_mc": lambda it: it.limits.slowdown is None,
        "npu_freq_limit_hz": lambda it: it.limits.clock is None,
        "power_limit_default_mw": lambda it: it.limits.default_power is None,
        "power_limit_mw": lambda it: it.limits == Limits(),
    }
    for name, is_gone in gone.items():
        write(directory / name, None)
        assert is_gone(read(root)), name
    assert read(root).cores


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"7" * (1 << 20), b"-5\n", b"soon\n"])
def test_garbage_is_left_out(root: Path, content: bytes) -> None:
    for path in management(root, 0, "rngd").iterdir():
        if path.name.startswith(("throttle", "power", "npu_freq", "npu_slow", "hw_")):
            write(path, content)
    reading = read(root)
    assert (reading.throttle, reading.limits) == (None, Limits())
    assert reading.error_text in (None, "-5", "soon")


@pytest.mark.parametrize(
    ("held", "total", "used"),
    [
        # One core has the whole card's figure, as one host showed it.
        ({0: (0xBC0003000, 0x40000000)}, 0xBC0003000, 0x40000000),
        # Each core has the whole card's figure.
        (dict.fromkeys(range(8), (0xBC0003000, 0x40000000)), 0xBC0003000, 0x40000000),
        # A core in use with all zeros has no figure; and one has more than any card.
        ({0: (0, 0)}, 0, 0),
        ({0: (1 << 60, 5)}, 0, 0),
        ({0: (6 << 30, 0), 1: (6 << 30, 1 << 30)}, 12 << 30, 1 << 30),
    ],
)
def test_cores_never_have_more_memory_than_the_card(
    root: Path, held: dict[int, tuple[int, int]], total: int, used: int
) -> None:
    directory = management(root, 0, "rngd")
    write(directory / "pe_occupancy", None)
    for core, (capacity, usage) in held.items():
        text = f"dram_capacity: {capacity:#x}\ndram_usage: {usage:#x}\nshared_capacity: 0x0\n"
        write(directory.parent / f"rngd!npu0pe{core}/alloc_status", text)
    cores = read(root).cores
    assert sum(core.dram_total or 0 for core in cores) == pytest.approx(total, abs=8)
    assert sum(core.dram_used or 0 for core in cores) == pytest.approx(used, abs=8)
    assert {core.core for core in cores if core.utilization == 0.0}.isdisjoint(held), "not free"


@pytest.mark.parametrize("name", ["npu0p2pmem", "npu0_p2pmem"])
def test_the_node_for_transfers_between_cards_is_given_where_there_is_one(
    root: Path, name: str
) -> None:
    host = Furiosa(root)
    [entry] = host.scan()
    assert not any("p2pmem" in node for node in host.identify(entry).nodes)
    (root / "dev/rngd" / name).touch()
    card = Furiosa(root).identify(entry)
    assert f"rngd/{name}" in card.nodes
    assert f"rngd/{name}" in card.access.nodes(card.all_cores)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("device_type", "Rng\n", "'Rng' is not known"),
        ("device_type", "XRNGD\n", "'XRNGD' is not known"),
        ("device_type", "Warboy\n", "'Warboy' is not known"),
        ("device_type", "RNGD_-\n", "'RNGD_-' is not known"),
        ("is_rngd_max_secondary", "1\n", "it is a part of another card"),
    ],
)
def test_other_types_are_not_served(root: Path, file: str, content: str, words: str) -> None:
    write(management(root, 0, "rngd") / file, content)
    host = Furiosa(root)
    with pytest.raises(NotServedError, match=words):
        host.identify(host.scan()[0])
    write(management(root, 0, "rngd") / file, "0\n" if "max" in file else "RNGD\n")
    host.identify(host.scan()[0])


@pytest.mark.parametrize(
    ("device_type", "product"),
    [
        ("RNGD+", "rngd-plus"),
        ("RngdPlus", "rngd-plus"),
        ("rngd+", "rngd-plus"),
        ("RNGD-S", "rngd-s"),
        ("RNGD_S", "rngd-s"),
        ("RNGD_MAX", "rngd-max"),
        ("rngd-max 2", "rngd-max2"),
    ],
)
def test_a_product_that_is_not_known_is_recognised_by_its_nodes(
    root: Path, device_type: str, product: str
) -> None:
    write(management(root, 0, "rngd") / "device_type", f"{device_type}\n")
    host = Furiosa(root)
    card = host.identify(host.scan()[0])
    assert (card.family, card.product) == ("rngd", product)
    assert card.oddities == (("ProductUnknown", device_type),)


@pytest.mark.parametrize(
    ("missing", "more", "words"),
    [
        ("pe4-7", None, "/dev lacks rngd/npu0pe4-7"),
        ("dmar", None, "/dev lacks rngd/npu0dmar"),
        (None, "pe8", "/dev has rngd/npu0pe8"),
        (None, "pe0-7", "/dev has rngd/npu0pe0-7"),
    ],
)
def test_a_driver_with_other_nodes_is_refused_in_words(
    root: Path, missing: str | None, more: str | None, words: str
) -> None:
    write(management(root, 0, "rngd") / "device_type", "RNGD+\n")
    if missing:
        (root / f"dev/rngd/npu0{missing}").unlink()
    if more:
        (root / f"dev/rngd/npu0{more}").touch()
    host = Furiosa(root)
    with pytest.raises(NotServedError, match=f"'RNGD\\+' is not known, and .*{words}"):
        host.identify(host.scan()[0])


def test_a_virtual_function_is_no_card(root: Path) -> None:
    host = Furiosa(root)
    [entry] = host.scan()
    address = host.identify(entry).pci_bus_id
    assert address
    device = root / "sys/bus/pci/devices" / address
    (device.resolve().parent / "0000:ff:00.0").mkdir()
    (device.resolve().parent / "0000:ff:00.0/vendor").write_text("0x1ed2\n", encoding="utf-8")
    (device / "physfn").symlink_to("../0000:ff:00.0")
    with pytest.raises(NotServedError, match=r"is a virtual function \(SR-IOV\)"):
        host.identify(entry)
    assert address not in [card.address for card in on_the_bus(root, "1ed2")]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("1.9.2, 3def9c2", False),
        ("2026.3.1, e28c5c0", False),
        ("2026.1.0(rc0), 5b172ac", False),
        ("0.0.16+b4a67ca", False),
        ("1.7.0, 4dfed1852e7b", False),
        ("", False),
        ("nightly of Tuesday", True),
        ("2027/1", True),
        ("9" * 300, False),  # no text of a driver: as if there were none
        ("\x1b[31m1.9.2", False),
    ],
)
def test_no_version_makes_a_card_vanish(root: Path, text: str, odd: bool) -> None:
    for file in ("version", "fw_version"):
        write(management(root, 0, "rngd") / file, text)
    host = Furiosa(root)
    card = host.identify(host.scan()[0])
    assert card.oddities == ((("VersionUnreadable", text),) * 2 if odd else ())
