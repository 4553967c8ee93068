from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.vendors.furiosa import parse

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SPACE = st.sampled_from(["", "\n", " \n", "\t", "\r\n"])
UUID = "E23A7C54-0000-4E50-8000-6E70752D6167"


@pytest.mark.parametrize(
    ("parser", "raw", "value"),
    [
        *((parse.text, raw, None) for raw in (None, b"", b" \n", b"a\nb", b"a\0", b"\xff")),
        (parse.text, b"x" * 257, None),
        (parse.text, "2025.4.0~dev2, é\r\n".encode(), "2025.4.0~dev2, é"),
        (parse.identifier, f"{UUID}\n".encode(), UUID),
        *((parse.identifier, raw, None) for raw in (b"../../etc", b"a/b", b"a b", b"-a", b"\xe9")),
        (parse.identifier, b"x" * 51, None),
        (parse.pci_address, b"0000:6D:00.0\n", "0000:6d:00.0"),
        (parse.pci_address, b"0001e240:ff:1f.7", "0001e240:ff:1f.7"),
        *((parse.pci_address, raw, None) for raw in (b"6d:00.0", b"0000:6d:00.8", b"0000:6d:00")),
        (parse.device_number, b"509:1048575\n", "509:1048575"),
        *((parse.device_number, raw, None) for raw in (b"509", b"a:0", b"1:2:3")),
        (parse.integer, b"18446744073709551615\n", 2**64 - 1),
        (parse.integer, b"-9223372036854775808 \n", -(2**63)),
        (parse.integer, b"7\n", 7),
        *((parse.integer, raw, None) for raw in (b"1.5", b"0x10", b"+1", b"12x", b"1 2")),
        *((parse.integer, b"%d" % raw, None) for raw in (2**64, -(2**63) - 1, 10**200)),
        (parse.integer, "\u0661".encode(), None),
        (parse.numa_node, b"3", 3),
        *((parse.numa_node, raw, None) for raw in (b"-1\n", b"70000", b"")),
        (parse.link_speed, b"32.0 GT/s PCIe\n", 32.0),
        (parse.link_speed, b"8 GT/s\n", 8.0),  # Linux before 5.8
        *((parse.link_speed, raw, None) for raw in (b"Unknown\n", b"133 MHz PCI-X 533", b"", None)),
        (parse.aer_total, b"Undefined 0\nDLP 3\nTOTAL_ERR_FATAL 3\n", 3),
        *((parse.aer_total, raw, None) for raw in (b"DLP 3\n", b"TOTAL_ERR_FATAL -1", b"", None)),
        (parse.liveness, b"1\n", True),
        (parse.liveness, b"0", False),
        *((parse.liveness, raw, None) for raw in (b" \n", None)),
    ],
)
def test_a_value(
    parser: Callable[[bytes | None], object], raw: bytes | None, value: object
) -> None:
    assert parser(raw) == value


NAMES = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=40
).filter(lambda name: name == name.strip())


@given(st.dictionaries(NAMES, st.tuples(U64, st.sampled_from(["{}", "{:#x}"])), max_size=20), SPACE)
def test_numbers_come_back_as_written(lines: dict[str, tuple[int, str]], end: str) -> None:
    text = "\n".join(f"{name}: {form.format(value)}" for name, (value, form) in lines.items())
    expected = tuple((name, value) for name, (value, _) in lines.items())
    assert parse.numbers((text + end).encode()) == expected


def test_numbers_leave_out_lines_that_do_not_fit() -> None:
    raw = (
        b"good: 1\n: 2\nno number: x\nnegative: -1\nbare hex: ff\nbroken hex: 0xZZ\n"
        b"dam\xffaged: 3\ngood: 4\ntoo big: 18446744073709551616\nlong" + b"g" * 300 + b": 5\n"
        b"name: with colon: 6\ncut o"
    )
    assert parse.numbers(raw) == (("good", 1), ("name: with colon", 6))


def test_liveness_of_another_word_is_refused_with_a_short_reason() -> None:
    with pytest.raises(ValueError, match=r'^neither 0 nor 1 but "xxx.{,80}$'):
        parse.liveness(b"x" * 4000)
    for binary in (b"\xff" + b"x" * 19, b"\x00" * 20):
        with pytest.raises(ValueError, match=r"^neither 0 nor 1 but binary data \(20 bytes\)$"):
            parse.liveness(binary)


# Figures of cores.


@given(U32.filter(lambda high: high != 2**32 - 1), U32, U32, SPACE)
def test_perf_regs_come_back_as_written(high: int, low: int, task: int, end: str) -> None:
    raw = (
        f"ProgramCounter: 0x10b74\nTaskExecutionTime: {task:#x}\nLastTensorExecutionTime: 0xa7\n"
        f"TensorExecutionTime: 0x1\nCycleCount: {low:#x}\nCycleCountHigh: {high:#x}{end}"
    )
    assert parse.perf_regs(raw.encode()) == (high << 32 | low, task)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"TaskExecutionTime: 0x1\nCycleCount: 0x2\n",
        b"TaskExecutionTime: 0x1\nCycleCount: 0x2\nCycleCountHigh: 0x",
        b"TaskExecutionTime: 0x100000000\nCycleCount: 0x2\nCycleCountHigh: 0x0\n",
        b"TaskExecutionTime: -0x1\nCycleCount: 0x2\nCycleCountHigh: 0x0\n",
        b"xTaskExecutionTime: 0x1\nCycleCount: 0x2\nCycleCountHigh: 0x0\n",
        b"TaskExecutionTime: 0xffffffff\nCycleCount: 0xffffffff\nCycleCountHigh: 0xffffffff\n",
    ],
)
def test_registers_that_are_cut_off_or_all_ones_are_no_count(raw: bytes) -> None:
    assert parse.perf_regs(raw) is None


@given(
    U64.filter(lambda value: value != 2**64 - 1),
    U64,
    st.sampled_from(["{}: {:#x}\n{}: {:#x}", "{}: {:x}\n{}: {:x}", "{}:{:#X}\r\n{} : {:#X}"]),
    SPACE,
)
def test_metrics_and_memory_come_back_as_written(one: int, two: int, form: str, end: str) -> None:
    metrics = form.format("TaskCycleCount", two, "CycleCount", one) + end
    assert parse.metrics(metrics.encode()) == (one, two)
    memory = form.format("dram_capacity", one, "dram_usage", two) + end
    assert parse.alloc_status(memory.encode()) == ((one, two) if one else None)


def test_a_capacity_of_0_is_no_figure_and_shared_memory_is_not_the_cards() -> None:
    zeros = b"dram_capacity: 0x0\ndram_usage: 0x0\nshared_capacity: 0x0\nshared_usage: 0x0\n"
    assert parse.alloc_status(zeros) is None
    used = b"shared_capacity: 0x5\ndram_capacity: 0xbc0003000\nshared_usage: 0x1\ndram_usage: 0x0\n"
    assert parse.alloc_status(used) == (0xBC0003000, 0)


@pytest.mark.parametrize(
    ("raw", "reasons"),
    [
        (b"0x00000000\n", ()),
        (b"0x00000102\n", ("thermal_slowdown", "bit_8")),
        (b"00000004\n", ("app_power_cap",)),
        (b"0xffffffff\n", None),
        (b"", None),
        (None, None),
        (b"THROTTLE_IDLE\n", None),
        (b"0x000000004\n", None),
        (b"4" * (1 << 20), None),
    ],
)
def test_the_mask_of_reasons_to_throttle(
    raw: bytes | None, reasons: tuple[str, ...] | None
) -> None:
    assert parse.throttle(raw) == reasons


def test_a_number_that_cannot_be_true_is_none() -> None:
    texts = (b"300000\n", b"300000", b"999\n", b"-1\n", b"1e5\n", b"18446744073709551615\n", None)
    found = [parse.within(text, 1_000, 10_000_000) for text in texts]
    assert found == [300_000, 300_000, None, None, None, None, None]


@pytest.mark.parametrize(
    "raw",
    [
        b"CycleCount: 0x1\n",
        b"CycleCount: 0x1\nTaskCycleCount: 0x" + b"1" * 17,
        b"CycleCount: 0xffffffffffffffff\nTaskCycleCount: 0x1\n",  # off the bus
    ],
)
def test_metrics_without_both_counters_are_none(raw: bytes) -> None:
    assert parse.metrics(raw) is None


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"0\n1\n", (0, 1)),
        (b"pe0 (MHz): 1000\npe1 (MHz): 900", (1000, 900)),
        (b"-1\nmaybe\n", (None, None)),
        (b"1\n", ()),
        (b"1\n1\n1\n", ()),
        (None, ()),
    ],
)
def test_a_line_a_core(raw: bytes | None, found: tuple[int | None, ...]) -> None:
    assert parse.per_core(raw, 2) == found
