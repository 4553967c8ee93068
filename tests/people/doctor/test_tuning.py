"""Notes on a host whose jobs would fail or be slow: io_uring, huge pages, ACS of switches."""

from __future__ import annotations

import shutil

import pytest

from npu_agent.files import SIMULATION
from npu_agent.people.doctor.check import Check, State
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.people.doctor.helpers import TUNED, Node, put

SYSCTL, PAGES = TUNED


async def line(node: Node, name: str) -> Check:
    return (await node.examined())[name]


@pytest.mark.parametrize(
    ("value", "state", "words"),
    [
        ("0\n", State.OK, "is 0"),
        ("1\n", State.NOTE, "only CAP_SYS_ADMIN"),
        ("2\n", State.NOTE, "is 2: no process may use it"),
    ],
)
async def test_the_sysctl(node: Node, value: str, state: State, words: str) -> None:
    put(node.root / SYSCTL, value.encode())
    check = await line(node, "io_uring")
    assert check.state is state
    assert words in check.detail
    assert state is State.OK or "kernel.io_uring_disabled = 0 in /etc/sysctl.d" in check.remedy


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("0\n", State.NOTE),
        ("65535\n", State.NOTE),
        ("65536\n", State.OK),
        ("many\n", State.UNUSED),
    ],
)
async def test_huge_pages(node: Node, value: str, state: State) -> None:
    put(node.root / PAGES, value.encode())
    check = await line(node, "huge pages")
    assert check.state is state
    assert state is not State.NOTE or "vm.nr_hugepages = 65536" in check.remedy


def config(control: int, *, loops: bool = False) -> bytes:
    """A switch port's configuration: an error capability, then ACS."""
    raw = bytearray(4096)
    raw[0x100:0x104] = (0x150 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    after = 0x100 if loops else 0
    acs = 0x0002 if loops else 0x000D
    raw[0x150:0x154] = (after << 20 | 1 << 16 | acs).to_bytes(4, "little")
    raw[0x156:0x158] = control.to_bytes(2, "little")
    return bytes(raw)


@pytest.mark.parametrize(
    ("content", "state", "words"),
    [
        (config(0), State.OK, "straight on"),
        (config(0x1D), State.NOTE, "make a detour"),
        (config(0x01), State.OK, "straight on"),
        (config(0x1D, loops=True), State.OK, "straight on"),
        (b"\xff" * 64, State.UNKNOWN, "only root"),
        (b"", State.UNKNOWN, "only root"),
    ],
)
async def test_acs_of_the_switches_above_the_cards(
    node: Node, content: bytes, state: State, words: str
) -> None:
    host = Furiosa(node.root)
    (rngd,) = (entry for entry in host.scan() if entry.family == "rngd")
    card = host.identify(rngd)
    *_, upstream, downstream = card.switches
    for port in (upstream, downstream):
        put(node.root / "sys/bus/pci/devices" / port / "config", content)
    check = await line(node, "ACS")
    assert check.state is state
    assert words in check.detail
    if state is State.NOTE:
        assert f"setpci -s {min(upstream, downstream)} ECAP_ACS+0x6.w=0000" in check.remedy


async def test_settings_that_a_host_does_not_have(node: Node) -> None:
    (node.root / PAGES).unlink()
    assert (await line(node, "huge pages")).state is State.UNUSED
    shutil.rmtree(node.root / "proc")
    assert (await line(node, "io_uring")).state is State.UNUSED, "of this machine's kernel"
    (node.root / SIMULATION).rename(node.root / "none")
    assert (await line(node, "io_uring")).state is not State.UNUSED, "of this machine's kernel"


async def test_a_host_with_other_cards_has_none_of_these_lines(node: Node) -> None:
    for path in (node.root / "sys/class/rngd_mgmt").iterdir():
        path.unlink()
    assert not {"io_uring", "huge pages", "ACS"} & (await node.examined()).keys()
