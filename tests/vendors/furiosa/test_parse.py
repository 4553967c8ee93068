from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.vendors.furiosa import parse

DAMAGED = st.one_of(
    st.none(),
    st.binary(max_size=600),
    st.text(max_size=300).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from([b"9" * (1 << 16), b"\0" * 4096, b"a: 1\n" * 20_000, b": 1\n", b"\xff\xfe1"]),
    # Almost right: a good answer with a piece cut out, doubled or changed.
    st.tuples(
        st.sampled_from(
            [
                b"FuriosaAI\n",
                b"0000:6d:00.0",
                b"509:0\n",
                b"E23A7C54-0000-4E50-8000-6E70752D6167\n",
                b"-12\n",
                b"1\n",
                b"AXI Post Error: 12\nPCIe Doorbell done: 0x3f\n",
            ]
        ),
        st.integers(0, 50),
        st.binary(max_size=3),
        st.integers(0, 50),
    ).map(lambda t: t[0][: t[1]] + t[2] + t[0][t[3] :]),
)

U64 = st.integers(0, 2**64 - 1)
SPACE = st.sampled_from(["", "\n", " \n", "\t", "\r\n"])


@given(DAMAGED)
def test_text_is_one_printable_line_or_nothing(raw: bytes | None) -> None:
    found = parse.text(raw)
    assert found is None or (
        0 < len(found) <= 256 and found.isprintable() and found == found.strip()
    )


@given(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=60), SPACE)
def test_text_comes_back_as_written(line: str, end: str) -> None:
    assert parse.text((line + end).encode()) == line


@pytest.mark.parametrize("raw", [None, b"", b" \n", b"a\nb", b"a\0", b"\xff", b"x" * 257])
def test_what_is_no_line_of_text_is_nothing(raw: bytes | None) -> None:
    assert parse.text(raw) is None


@given(DAMAGED)
def test_identifiers_are_safe_in_device_ids(raw: bytes | None) -> None:
    found = parse.identifier(raw)
    if found is not None:
        assert len(f"{found}_cores_0-3") <= 63
        assert found.isascii()
        assert not set(found) - set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"
        )
        assert found[0].isalnum()


@given(st.uuids().map(lambda uuid: str(uuid).upper()), SPACE)
def test_uuids_come_back_as_written(uuid: str, end: str) -> None:
    assert parse.identifier((uuid + end).encode()) == uuid


@pytest.mark.parametrize("raw", [b"../../etc", b"a/b", b"a b", b"-a", b"x" * 51, "é".encode()])
def test_what_could_be_a_path_or_an_option_is_no_identifier(raw: bytes) -> None:
    assert parse.identifier(raw) is None


@given(DAMAGED)
def test_pci_addresses_are_in_the_kernels_form(raw: bytes | None) -> None:
    found = parse.pci_address(raw)
    if found is not None:
        domain, bus, rest = found.split(":")
        device, function = rest.split(".")
        assert 0 <= int(domain, 16) < 2**32
        assert 0 <= int(bus, 16) < 2**8
        assert 0 <= int(device, 16) < 2**8
        assert 0 <= int(function) < 8
        assert found == found.lower()


@given(
    st.tuples(
        st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)
    ),
    SPACE,
    st.sampled_from([str.lower, str.upper]),
)
def test_pci_addresses_come_back_in_lower_case(
    parts: tuple[int, int, int, int], end: str, case: Callable[[str], str]
) -> None:
    address = "{:04x}:{:02x}:{:02x}.{}".format(*parts)
    assert parse.pci_address((case(address) + end).encode()) == address


@pytest.mark.parametrize("raw", [b"6d:00.0", b"0000:6d:00.8", b"0000:6d:00", b"0000-6d-00.0"])
def test_what_has_no_domain_or_function_is_no_pci_address(raw: bytes) -> None:
    assert parse.pci_address(raw) is None


@given(DAMAGED)
def test_device_numbers_are_two_numbers(raw: bytes | None) -> None:
    found = parse.device_number(raw)
    if found is not None:
        major, minor = found.split(":")
        assert major.isdecimal()
        assert minor.isdecimal()


@given(st.integers(0, 4095), st.integers(0, 2**20 - 1), SPACE)
def test_device_numbers_come_back_as_written(major: int, minor: int, end: str) -> None:
    assert parse.device_number(f"{major}:{minor}{end}".encode()) == f"{major}:{minor}"


@given(DAMAGED)
def test_integers_fit_64_bits(raw: bytes | None) -> None:
    found = parse.integer(raw)
    assert found is None or -(2**63) <= found < 2**64


@given(st.integers(-(2**63), 2**64 - 1), SPACE)
def test_integers_come_back_as_written(value: int, end: str) -> None:
    assert parse.integer(f"{value}{end}".encode()) == value


@pytest.mark.parametrize(
    "raw",
    [
        b"1.5",
        b"0x10",
        b"+1",
        b"1_000",
        "\u0661".encode(),
        b"1 2",
        b"%d" % 2**64,
        b"%d" % (-(2**63) - 1),
        b"9" * 200,
    ],
)
def test_what_is_no_64_bit_decimal_is_no_integer(raw: bytes) -> None:
    assert parse.integer(raw) is None


@given(DAMAGED)
def test_numa_nodes_are_small_and_not_negative(raw: bytes | None) -> None:
    found = parse.numa_node(raw)
    assert found is None or 0 <= found < 2**16


@pytest.mark.parametrize(
    ("raw", "node"), [(b"0\n", 0), (b"3", 3), (b"-1\n", None), (b"70000", None), (b"", None)]
)
def test_a_numa_node_of_minus_one_is_none(raw: bytes, node: int | None) -> None:
    assert parse.numa_node(raw) == node


@given(DAMAGED)
def test_numbers_are_few_named_and_unsigned(raw: bytes | None) -> None:
    found = parse.numbers(raw)
    assert len(found) <= 256
    assert len(dict(found)) == len(found)
    for name, value in found:
        assert 0 < len(name) <= 256
        assert name.isascii()
        assert name.isprintable()
        assert 0 <= value < 2**64


NAMES = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=40
).filter(lambda name: name == name.strip())


@given(st.dictionaries(NAMES, st.tuples(U64, st.sampled_from(["{}", "{:#x}"])), max_size=20), SPACE)
def test_numbers_come_back_as_written(lines: dict[str, tuple[int, str]], end: str) -> None:
    text = "\n".join(f"{name}: {form.format(value)}" for name, (value, form) in lines.items())
    expected = tuple((name, value) for name, (value, _) in lines.items())
    assert parse.numbers((text + end).encode()) == expected


def test_numbers_leave_out_what_does_not_fit() -> None:
    raw = (
        b"good: 1\n: 2\nno number: x\nnegative: -1\nbare hex: ff\nbroken hex: 0xZZ\n"
        b"dam\xffaged: 3\ngood: 4\ntoo big: 18446744073709551616\nlong" + b"g" * 300 + b": 5\n"
        b"name: with colon: 6\ncut o"
    )
    assert parse.numbers(raw) == (("good", 1), ("name: with colon", 6))


@given(DAMAGED)
def test_error_counters_have_names_fit_for_metrics(raw: bytes | None) -> None:
    for name, value in parse.errors(raw):
        assert name.replace("_", "").isalnum()
        assert name == parse.normalised(name)
        assert not name.endswith("_doorbell_done")
        assert 0 <= value < 2**64


def test_the_drivers_error_file() -> None:
    raw = (
        b"AXI Post Error: 1\nAXI Fetch Error: 2\nAXI Discard Error: 3\nAXI Doorbell done: 99\n"
        b"PCIe Post Error: 4\nPCIe Fetch Error: 5\nPCIe Discard Error: 6\n"
        b"PCIe Doorbell done: 99\nDevice Error: 7\n"
    )
    assert parse.errors(raw) == (
        ("axi_post_error", 1),
        ("axi_fetch_error", 2),
        ("axi_discard_error", 3),
        ("pcie_post_error", 4),
        ("pcie_fetch_error", 5),
        ("pcie_discard_error", 6),
        ("device_error", 7),
    )


@given(DAMAGED)
def test_liveness_is_told_or_unknown_or_refused_with_a_short_reason(raw: bytes | None) -> None:
    expected = {b"1": True, b"0": False, b"": None}
    said = (raw or b"").strip()
    if said in expected:
        assert parse.liveness(raw) is expected[said]
        return
    with pytest.raises(ValueError, match="neither 0 nor 1") as caught:
        parse.liveness(raw)
    assert len(str(caught.value)) < 120
    assert str(caught.value).isprintable()


def test_a_flood_of_numbers_is_cut() -> None:
    found = parse.numbers(b"".join(b"counter %d: 1\n" % number for number in range(10_000)))
    assert found == tuple((f"counter {number}", 1) for number in range(256))


def test_the_widest_counter_is_not_lost() -> None:
    """All ones is what a register reads as when its card fell off the bus."""
    assert parse.numbers(b"Device Error: 18446744073709551615") == (("Device Error", 2**64 - 1),)


# What is told of cores.


@given(DAMAGED)
def test_figures_of_cores_fit_64_bits(raw: bytes | None) -> None:
    for parser in (parse.perf_regs, parse.metrics, parse.alloc_status):
        found = parser(raw or b"")
        assert found is None or all(0 <= value < 2**64 for value in found)


U32 = st.integers(0, 2**32 - 1)


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
        b"TaskExecutionTime: 1\nCycleCount: 2\nCycleCountHigh: 0\n",
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
    assert parse.alloc_status(memory.encode()) == (one, two)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"CycleCount: 0x1\n",
        b"CycleCount: 0x1\nTaskCycleCount: 0x" + b"1" * 17,
        b"CycleCount: 0xffffffffffffffff\nTaskCycleCount: 0x1\n",  # off the bus
        b"x" * 65536,
    ],
)
def test_metrics_without_both_counters_are_none(raw: bytes) -> None:
    assert parse.metrics(raw) is None


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"0\n1\n", (0, 1)),
        (b"pe0 (MHz): 1000\npe1 (MHz): 900", (1000, 900)),
        (b"1\nmaybe\n", (1, None)),
        (b"-1\n0x1\n", (None, None)),
        (b"1\n", ()),
        (b"1\n1\n1\n", ()),
        (b"", ()),
        (None, ()),
        (b"9" * 65536, ()),
    ],
)
def test_a_line_a_core(raw: bytes | None, found: tuple[int | None, ...]) -> None:
    assert parse.per_core(raw, 2) == found
