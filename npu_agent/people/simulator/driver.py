"""The driver's files, links and device nodes at one moment, as plain values.

Formats and names: facts about the real drivers (docs/dev/hardware.md) and the public test trees of
the vendor's `device-api` library, whose last newlines are kept: some files have none.
Paths are relative to the root of the tree.

Two things cannot be as on a real host:

- `perf_regs` of a core that is not in use refuses to be read ("Permission denied"). Mode bits do
  not stop root, so here the file is empty. In use is what has load: when both cores of a Warboy
  have, one container holds the fused node, and the single ones are not in use.
- The lines of `npu_clocks`, `metrics` and `hw_error` are not published; here they are
  `name (MHz): number`, `name: 0xhex` and one hex number.

An RNGD shows what driver 2026.3 does on hosts whose owners published its values; with `OLD_RNGD`,
what the vendor's test trees of 2025 have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from npu_agent.people.simulator.cards import CardSpec
from npu_agent.people.simulator.families import OLD_RNGD
from npu_agent.people.simulator.picture import Content, Link, Picture, Special
from npu_agent.people.simulator.telemetry import AMBIENT_CELSIUS, CardTelemetry

_U32 = 0xFFFF_FFFF
Broken = Mapping[str, Content | None]
"""What is at each path in place of what a healthy card shows; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The driver's values for all cards of one family.

    `fused` are the PE ranges with a node of their own; `core_dram` is the bytes of DRAM per core
    that the driver reports, or 0; `link_speed` is the GT/s of PCIe.
    """

    device_type: str
    pci_device: int
    link_speed: float
    class_dir: str
    dev_dir: str = ""
    fused: tuple[str, ...]
    core_dram: int = 0


TRAITS = {
    "warboy": Traits(
        device_type="Warboy", pci_device=0, link_speed=16.0, class_dir="npu_mgmt", fused=("0-1",)
    ),
    "rngd": Traits(
        device_type="RNGD",
        pci_device=1,
        link_speed=32.0,
        class_dir="rngd_mgmt",
        dev_dir="rngd/",
        fused=("0-1", "2-3", "4-5", "6-7", "0-3", "4-7"),
        core_dram=(95 << 29) // 8,  # 47.5 GiB a card
    ),
}


def picture(spec: CardSpec, state: CardTelemetry) -> Picture:
    return files(spec, state) | links(spec) | dict.fromkeys(nodes(spec), Special.NODE)


def directories(family: str) -> frozenset[str]:
    """Directories that stay when the last card goes: the driver is loaded, nothing is bound."""
    of = TRAITS[family]
    classes = {f"sys/class/{of.class_dir}", f"sys/devices/virtual/{of.class_dir}"}
    return frozenset(classes | {f"dev/{of.dev_dir}".rstrip("/")})


def management(spec: CardSpec) -> str:
    name = f"rngd!{spec.name}mgmt" if spec.family == "rngd" else f"{spec.name}_mgmt"
    return f"sys/devices/virtual/{TRAITS[spec.family].class_dir}/{name}"


def core(spec: CardSpec, pe: str) -> str:
    prefix = "rngd!" if spec.family == "rngd" else ""
    return f"sys/devices/virtual/{TRAITS[spec.family].class_dir}/{prefix}{spec.name}pe{pe}"


def liveness(spec: CardSpec) -> str:
    return f"{management(spec)}/{'device_state' if spec.family == 'rngd' else 'alive'}"


def hwmon(spec: CardSpec) -> str:
    return f"{_pci(spec)}/hwmon/hwmon{spec.index}"


def broken(spec: CardSpec, state: CardTelemetry) -> dict[str, Broken]:
    alive = liveness(spec)
    directory = management(spec)
    sensors = hwmon(spec)

    # Only what the sensors say: load and power stay, as with a fan that failed. 40 to 70 °C become
    # 97 to 103 °C without delay, so that a tree made with --once shows it, too.
    warm = replace(state, temperature=tuple(97.0 + (t - 40.0) / 5 for t in state.temperature))
    hot = {name: text for name, text in _sensors(spec, warm).items() if name.startswith("temp")}
    unreadable = (
        alive,
        *(f"{directory}/{name}" for name in ("heartbeat", "atr_error", "throttle_reason")),
        *(f"{sensors}/{name}" for name in ("power1_average", "temp1_input")),
        *(f"{core(spec, '0')}/{name}" for name in ("perf_regs", "metrics")),
    )
    return {
        "dead": {alive: "0\n"},
        "hang": {alive: Special.FIFO},
        "narrow": {f"{_pci(spec)}/current_link_width": "8\n"},
        "slow-link": {f"{_pci(spec)}/current_link_speed": "8.0 GT/s PCIe\n"},
        "bus-errors": {f"{_pci(spec)}/aer_dev_nonfatal": _aer("NONFATAL", 1 + state.ticks)},
        "no-node": {node(spec, "pe0"): None},
        "hot": {f"{sensors}/{name}": text for name, text in hot.items()},
        "slow": {
            f"{directory}/npu_clocks": _clocks(spec, 1700),
            f"{directory}/ne_clk_freq_info": "ne tensor (MHz): 1700\n",
            f"{directory}/power_limit_mw": "225000\n",
            f"{directory}/power_max_mw": "225000\n",
            f"{directory}/throttle_reason": "0x00000004\n",
        },
        "unreadable": dict.fromkeys(unreadable, Special.DIRECTORY),
        "garbage": _garbage(spec),
    }


def _garbage(spec: CardSpec) -> dict[str, Content]:
    """Binary, cut-off or huge content."""
    directory = management(spec)
    sensors = hwmon(spec)
    return {
        liveness(spec): b"\xff\xfe\x00\x80" * 16,  # not text
        f"{directory}/heartbeat": "9" * (1 << 20),  # a number, but huge
        f"{directory}/atr_error": "AXI Post Error: 0\nAXI Fetch Er",  # ends in the middle
        f"{directory}/fw_version": b"\x00\xc3(\x9f",
        f"{directory}/hw_error": b"\xff\x00" * 2048,
        f"{directory}/power_limit_mw": "-1e400\n",
        f"{directory}/throttle_reason": b"0x\xff\n",
        f"{directory}/npu_clocks": "pe0 (MHz)\n: 5\n\n:::\n",
        f"{directory}/ne_clk_freq_info": "ne tensor (MHz)\n: 5\n\n:::\n",
        f"{sensors}/temp1_input": b"\x80\x81\x82",
        f"{sensors}/temp2_input": "warm\n",
        f"{sensors}/power1_average": "",
        f"{core(spec, '0')}/perf_regs": "TaskExecutionTime: 0xZZ\nCycleCount: 0x",
        f"{core(spec, '0')}/metrics": b"CycleCount: \xff\xff\n",
        f"{core(spec, '0')}/alloc_status": "x" * (1 << 16),
    }


def node(spec: CardSpec, rest: str) -> str:
    """A device node of the card: `node(spec, "pe0")`."""
    return f"dev/{TRAITS[spec.family].dev_dir}{spec.name}{rest}"


def nodes(spec: CardSpec) -> frozenset[str]:
    ranges = [f"pe{pe}" for pe in (*map(str, range(spec.traits.cores)), *TRAITS[spec.family].fused)]
    if spec.family == "rngd":
        channels = [f"ch{number}{end}" for number in range(8) for end in ("", "r")]
        others = ["mgmt", "bar0", "bar2", "bar4", "dmar", *channels]
    else:
        others = ["", "_mgmt", *(f"ch{number}" for number in range(4))]
    return frozenset(node(spec, rest) for rest in (*ranges, *others))


def links(spec: CardSpec) -> dict[str, Content]:
    """The class directory and the PCI bus, which only point to where things really are."""
    of = TRAITS[spec.family]
    ranges = [*map(str, range(spec.traits.cores)), *(() if spec.family == "rngd" else of.fused)]
    real = [management(spec), *(core(spec, pe) for pe in ranges)]
    tree: dict[str, Content] = {
        f"sys/class/{of.class_dir}/{PurePosixPath(path).name}": Link(
            path.replace("sys", "../..", 1)
        )
        for path in real
    }
    tree[f"sys/bus/pci/devices/{spec.pci_bus_id}"] = Link(_pci(spec).replace("sys", "../../..", 1))
    return tree


def files(spec: CardSpec, state: CardTelemetry) -> dict[str, Content]:
    tree: dict[str, Content] = {}
    for directory, content in (
        (management(spec), _management(spec, state)),
        (_pci(spec), _pci_files(spec)),
        (hwmon(spec), _sensors(spec, state)),
    ):
        tree |= {f"{directory}/{name}": text for name, text in content.items()}
    return tree | (_rngd_cores(spec, state) if spec.family == "rngd" else _perf_regs(spec, state))


def _management(spec: CardSpec, state: CardTelemetry) -> dict[str, str]:
    tree = {
        "platform_type": "FuriosaAI\n",
        "device_type": f"{TRAITS[spec.family].device_type}\n",
        "busname": spec.pci_bus_id,
        "dev": f"{spec.dev}\n" if spec.dev else "",
        "device_sn": spec.serial,
        "device_uuid": f"{spec.uuid}\n" if spec.uuid else "",
        "version": f"{spec.driver_version}\n" if spec.driver_version else "",
        "fw_version": spec.firmware_version,
        PurePosixPath(liveness(spec)).name: "1\n",
        "heartbeat": f"{int(state.uptime)}\n",
    }
    if spec.family != "rngd" or _is_old(spec):
        tree["soc_rev"] = f"{spec.revision}\n" if spec.revision else ""
        tree["atr_error"] = _atr_error(state)
    chip = f"{spec.index:08X}-{spec.uuid[:8] or 'A76AAD68'}\n"
    if spec.family == "rngd":
        tree |= {} if _is_old(spec) else _limits(state)
        return tree | {
            "npu_clocks": _clocks(spec, spec.traits.clock_mhz),
            "soc_id": chip,
            "pe_occupancy": "".join("1\n" if load else "0\n" for load in state.load),
        }
    return tree | {
        "ne_clk_freq_info": (
            "ne tensor (MHz): 2000\nne memory (MHz): 1000\n"
            f"ne operation (MHz): {spec.traits.clock_mhz}\ndram (MT/s): 4266\n"
        ),
        "soc_uid": chip,
    }


def _is_old(spec: CardSpec) -> bool:
    return spec.driver_version.startswith(OLD_RNGD)


def _clocks(spec: CardSpec, mhz: int) -> str:
    return "".join(f"pe{pe} (MHz): {mhz}\n" for pe in range(spec.traits.cores))


def _limits(state: CardTelemetry) -> dict[str, str]:
    """What a card may take and do, and what holds it up."""
    return {
        "device_pn": "RNGA0UNO-04\n",
        "hw_error": f"{state.errors & _U32:#010x}\n",
        "npu_freq_limit_hz": "2147483000\n",
        "npu_slowdown_temperature_mc": "80000\n",
        "power_limit_default_mw": "300000\n",
        "power_limit_mw": "300000\n",
        "power_max_mw": "675000\n",
        "throttle_reason": "0x00000000\n",
    }


def _atr_error(state: CardTelemetry) -> str:
    # The two "Doorbell done" lines count completed work; all others are failures.
    done = sum(state.task_cycles) // 50_000_000
    failures = state.errors
    lines = {
        "AXI Post Error": failures,
        "AXI Fetch Error": failures // 2,
        "AXI Discard Error": 0,
        "AXI Doorbell done": done,
        "PCIe Post Error": failures // 3,
        "PCIe Fetch Error": 0,
        "PCIe Discard Error": 0,
        "PCIe Doorbell done": done,
        "Device Error": failures,
    }
    return "".join(f"{name}: {value & _U32}\n" for name, value in lines.items())


def _pci(spec: CardSpec) -> str:
    return f"sys/devices/{spec.pci_path}/{spec.pci_bus_id}"


def _pci_files(spec: CardSpec) -> dict[str, str]:
    of = TRAITS[spec.family]
    return {
        "vendor": "0x1ed2\n",
        "device": f"0x{of.pci_device:04x}\n",
        "class": "0x120000\n",
        "numa_node": f"{spec.numa_node}\n",
        **{f"{which}_link_speed": f"{of.link_speed} GT/s PCIe\n" for which in ("current", "max")},
        "current_link_width": "16\n",
        "max_link_width": "16\n",
        "aer_dev_fatal": _aer("FATAL", 0),
        "aer_dev_nonfatal": _aer("NONFATAL", 0),
    }


def _aer(kind: str, count: int) -> str:
    """A kernel has a line for each of 20 errors; here it is the one that a host sees first."""
    return f"CmpltTO {count}\nTOTAL_ERR_{kind} {count}\n"


def _sensors(spec: CardSpec, state: CardTelemetry) -> dict[str, str]:
    """hwmon: m°C, µW, mV, mA, as the kernel's hwmon interface has them."""
    sensors = _rngd_sensors(state) if spec.family == "rngd" else _warboy_sensors(state)
    tree = {"name": f"{spec.name}\n"}
    for kind, suffix, first, per_unit, values in sensors:
        for number, (label, value) in enumerate(values.items(), first):
            tree[f"{kind}{number}_label"] = f"{label}\n"
            tree[f"{kind}{number}_{suffix}"] = f"{value * per_unit:.0f}\n"
    return tree


_Sensors = Iterator[tuple[str, str, int, int, dict[str, float]]]
"""The kind and ending of their files, the first number, the unit's parts, values by label."""


def _rngd_sensors(state: CardTelemetry) -> _Sensors:
    cores = {f"NPU_PE{pe}": celsius for pe, celsius in enumerate(state.temperature)}
    temperatures = {"PEAK": max(state.temperature), **cores, "AMBIENT": AMBIENT_CELSIUS}
    yield "power", "average", 1, 1_000_000, {"RMS_TOTAL": state.watts}
    yield "temp", "input", 1, 1_000, temperatures


def _warboy_sensors(state: CardTelemetry) -> _Sensors:
    """The labels are those of a test that the vendor runs on a card; their numbers are not."""
    watts = state.watts
    mean = sum(state.temperature) / len(state.temperature)
    core_watts = 0.7 * watts
    core_volts = 0.75
    board = (mean + AMBIENT_CELSIUS) / 2

    power = {
        "PCI Total RMS PWR": watts,
        "PCI 12V PWR": 0.95 * watts,
        "PCI 3.3V PWR": 0.05 * watts,
        "NE PWR": core_watts,
        "NE 12V PWR": 0.75 * watts,
        "NE Core RMS PWR": core_watts,
    }
    current = {
        "PCI 12V Curr": power["PCI 12V PWR"] / 12,
        "PCI 3.3V Curr": power["PCI 3.3V PWR"] / 3.3,
        "NE 12V Curr": power["NE 12V PWR"] / 12,
        "NE Current": core_watts / core_volts,
    }
    cores = {f"NE_PE{pe}": celsius for pe, celsius in enumerate(state.temperature)}
    temperatures = {"Peak": max(state.temperature), "Average": mean, "NE": mean, "NE_TOP": mean}
    boards = {"AMBIENT": AMBIENT_CELSIUS, "LPDDR4": board, "PCIE": board, "U74M": board}
    yield "power", "average", 1, 1_000_000, power
    yield "in", "input", 0, 1_000, {"NE Core Volt": core_volts, "NE Core 48V Volt": 48.0}
    yield "curr", "input", 1, 1_000, current
    yield "temp", "input", 1, 1_000, temperatures | cores | boards


def _perf_regs(spec: CardSpec, state: CardTelemetry) -> dict[str, Content]:
    tree: dict[str, Content] = {}
    fused = all(state.load)
    for pe, load in enumerate(state.load):
        alone = load and not fused
        text = _registers(state.cycles[pe], state.task_cycles[pe]) if alone else ""
        tree[f"{core(spec, str(pe))}/perf_regs"] = text
    task = sum(state.task_cycles) // len(state.task_cycles)
    text = _registers(state.cycles[0], task) if fused else ""
    for cores in TRAITS[spec.family].fused:
        tree[f"{core(spec, cores)}/perf_regs"] = text
    return tree


def _registers(cycles: int, task_cycles: int) -> str:
    lines = {
        "TaskExecutionTime": task_cycles,
        "LastTensorExecutionTime": 0xA7,
        "CycleCount": cycles,
        "CycleCountHigh": cycles >> 32,
    }
    return _hex({name: value & _U32 for name, value in lines.items()})


def _rngd_cores(spec: CardSpec, state: CardTelemetry) -> dict[str, Content]:
    tree: dict[str, Content] = {}
    capacity = TRAITS[spec.family].core_dram
    for pe, load in enumerate(state.load):
        used = int(capacity * (0.2 + 0.6 * load)) >> 21 << 21  # in pages of 2 MiB
        status = {"dram_capacity": capacity, "dram_usage": used} if load else {}
        if load and not _is_old(spec):
            status |= {"shared_capacity": 0, "shared_usage": 0}
        tree[f"{core(spec, str(pe))}/alloc_status"] = _hex(status)
        tree[f"{core(spec, str(pe))}/metrics"] = _hex(
            {"CycleCount": state.cycles[pe], "TaskCycleCount": state.task_cycles[pe]}
        )
    return tree


def _hex(values: Mapping[str, int]) -> str:
    return "".join(f"{name}: {value:#x}\n" for name, value in values.items())
