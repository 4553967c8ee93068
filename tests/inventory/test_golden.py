"""What simulated hosts look like to programs and to people: one golden file a host."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from npu_agent.core.hardware import CardState, CoreReading, Reading, SensorKind, Snapshot
from npu_agent.people import simulator
from npu_agent.people.cards import read_once
from npu_agent.people.commands import view
from npu_agent.people.simulator.tree import tick
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.golden import golden
from tests.inventory.helpers import management, tree, write

GOLDEN = Path(__file__).parent / "golden"

Edit = Callable[[Path], None]


def _nothing(_root: Path) -> None:
    pass


def _files(contents: Mapping[str, bytes | str | None]) -> Edit:
    """The first card's management files have these contents; None: there is none."""

    def edit(root: Path) -> None:
        for name, content in contents.items():
            write(management(root, 0) / name, content)

    return edit


def _faults(name: str) -> Edit:
    """Every card has this fault."""

    def edit(root: Path) -> None:
        for card in simulator.cards(root):
            simulator.apply_fault(root, card.spec.name, name)
        tick(root)

    return edit


def _no_core_entries(root: Path) -> None:
    for path in management(root, 0).parent.glob("npu0pe*"):
        shutil.rmtree(path)
    write(management(root, 0) / "ne_clk_freq_info", None)


def _old_rngd(root: Path) -> None:
    """Without what only newer drivers have."""
    specs = [card.spec for card in simulator.cards(root)]
    simulator.make(root, simulator.with_driver(specs, "2025.4"), plain_nodes=True)
    write(management(root, 0, "rngd") / "pe_occupancy", None)
    for path in management(root, 0, "rngd").parent.glob("rngd!npu0pe*"):
        shutil.rmtree(path)


def _other_management_name(root: Path) -> None:
    links = root / "sys/class/rngd_mgmt"
    (links / "rngd!npu0mgmt").rename(links / "rngd!npu0_mgmt")


def _pci(root: Path, index: int) -> Path:
    address = (management(root, index) / "busname").read_text(encoding="utf-8")
    return (root / "sys/bus/pci/devices" / address).resolve()


def _no_hwmon(root: Path) -> None:
    shutil.rmtree(_pci(root, 0) / "hwmon")


def _same_uuid(root: Path) -> None:
    write(
        management(root, 1) / "device_uuid",
        (management(root, 0) / "device_uuid").read_text(encoding="utf-8"),
    )


def _damaged(root: Path) -> None:
    """Everything that may be damaged is; the card is still told and served."""
    for name in ("device_uuid", "version", "fw_version", "heartbeat", "atr_error", "dev"):
        write(management(root, 0) / name, b"\xff\xfe\0" * 500)
    write(management(root, 0) / "ne_clk_freq_info", "ne tensor (MHz): 2000\nne mem")
    write(_pci(root, 0) / "hwmon/hwmon0/temp1_input", "warm")
    write(_pci(root, 0) / "hwmon/hwmon0/power1_label", None)


def _unreadable(root: Path) -> None:
    write(management(root, 0) / "device_type", None)
    (management(root, 0) / "device_type").mkdir()


def _circle(root: Path) -> None:
    entry = root / "sys/class/npu_mgmt/npu0_mgmt"
    entry.unlink()
    entry.symlink_to("npu0_mgmt")


def _no_class_directories(root: Path) -> None:
    shutil.rmtree(root / "sys")


def _class_directory_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "sys/class/npu_mgmt")
    (root / "sys/class/npu_mgmt").touch()


OLD = {"device_uuid": "\n", "fw_version": "", "dev": "", "alive": None, "soc_rev": None}
"""What a Warboy's driver of long ago says."""

HOSTS: dict[str, tuple[str, Edit]] = {
    "one-warboy": ("warboy=1", _nothing),
    "two-warboy-one-rngd": ("warboy=2,rngd=1", _nothing),
    "busy-warboy-and-rngd": ("warboy=1,rngd=1", _faults("busy")),
    "busy-on-one-core": ("warboy=1,rngd=1", _faults("busy-one")),
    "no-core-entries": ("warboy=1", _no_core_entries),
    "old-rngd": ("rngd=1", _old_rngd),
    "old-driver": ("warboy=1", _files(OLD)),
    "rngd-other-management-name": ("rngd=1", _other_management_name),
    "no-hwmon": ("warboy=1", _no_hwmon),
    "fpga-sample": ("warboy=2", _files({"platform_type": "VITIS\n"})),
    "other-vendor": ("warboy=2", _files({"platform_type": "Acme\n"})),
    "same-uuid": ("warboy=2", _same_uuid),
    "no-identity": ("warboy=1", _files(dict.fromkeys(("device_uuid", "device_sn", "busname"), ""))),
    "damaged": ("warboy=1", _damaged),
    "unreadable-type": ("warboy=2", _unreadable),
    "dead-at-start": ("warboy=2", _files({"alive": "0\n"})),
    "nonsense-at-start": ("warboy=2", _files({"alive": b"\xff\x00maybe"})),
    "entry-in-a-circle": ("warboy=2", _circle),
    "no-cards": ("warboy=0", _nothing),
    "no-class-directories": ("warboy=0", _no_class_directories),
    "class-directory-is-a-file": ("warboy=1,rngd=1", _class_directory_is_a_file),
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_look_as_in_their_golden_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards, edit = HOSTS[name]
    root = tree(tmp_path / "host", cards)
    edit(root)
    snapshot = asyncio.run(read_once(Furiosa(root)))
    print(view.drawn(view.cards_table(snapshot)))
    table = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    cards_json = json.dumps(view.cards_as_json(snapshot), indent=2)
    found = f"{_picture(snapshot)}\n# info\n{table}\n# info --format json\n{cards_json}\n"
    found = found.replace(str(root), "")
    assert found == golden(GOLDEN / f"{name}.txt", found)


def _picture(snapshot: Snapshot) -> str:
    lines = [line for state in snapshot.cards for line in _card(state)]
    for odd in snapshot.skipped:
        sample = f" (sample of {odd.sample_of})" if odd.sample_of else ""
        lines.append(f"odd {odd.entry}: {odd.reason}{sample}")
    return "\n".join(("# snapshot", *lines, f"complete: {snapshot.complete}", ""))


def _card(state: CardState) -> list[str]:
    card, reading = state.card, state.reading
    assert reading is not None
    return [
        f"{card.name}: {state.id}",
        f"  {card.family} {card.product}, {card.dev}, {card.pci_bus_id}, NUMA {card.numa_node}",
        f"  uuid {card.uuid}, serial {card.serial}",
        f"  driver {card.driver_version}; firmware {card.firmware_version}",
        f"  switches {' '.join(card.switches) or None}",
        f"  nodes {' '.join(sorted(card.nodes)) or None}",
        f"  {state.health.state.value}: {state.health.reason}",
        f"  alive {reading.alive}, uptime {reading.uptime}",
        f"  errors {dict(reading.errors)}",
        *(
            f"  {kind.name.lower()} in {kind.value}: {_sensors(reading, kind)}"
            for kind in SensorKind
        ),
        *(f"  core {core.core}: {_figures(core)}" for core in reading.cores),
    ]


def _sensors(reading: Reading, kind: SensorKind) -> str:
    values = (f"{sensor.label} {sensor.value}" for sensor in reading.sensors if sensor.kind is kind)
    return ", ".join(values) or "none"


def _figures(core: CoreReading) -> str:
    """What is told of a core; figures that are not told are not there."""
    told = {f.name: getattr(core, f.name) for f in fields(core) if f.name != "core"}
    return ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
