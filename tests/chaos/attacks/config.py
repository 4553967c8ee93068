"""Attacks by the config file."""

from __future__ import annotations

import asyncio
import random

from bench.process import RESOURCE
from tests.chaos.table import attack
from tests.chaos.world import World, replaced

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
VALUES = (
    "interval: .inf", "interval: .nan", "interval: 1e400", "interval: -1", "interval: 1e-300",
    "interval: 0x7fffffffffffffffffffffff", "interval: 2001-01-01", "health: {failures: 1.5}",
    "health: {interval: '1'}", "labels: {resync: .inf}", "labels: {sets: [beta, beta]}",
    "labels: {sets: {}}", "resources: [{name: 'a\\nb', family: warboy}]", "defaultPe: [Fusion]",
    "disabledDevices: npu0", "disabledDevices: [{devName: [7]}]", "metrics: {interval: null}",
    "events: 'no'", "log: {level: \"\\e[2J\"}", "? [a, b]\n: c", "<<: {defaultPe: Single}",
    "defaultPe: Single\ndefaultPe: Fusion", "!!binary aGk=", "--- a\n--- b",
)  # fmt: skip


@attack()
async def configs_that_are_none(here: World) -> None:
    """The config file becomes noise, an alias bomb, 12 MB, brackets without end, a foreign key.

    The last good config stays in force, and so does the registration; the next good one is taken.
    """
    contents = (
        random.Random(1).randbytes(10_000), BOMB.encode(), b"\x1b[2J: \x00", b"a: " * 100_000,
        b"- " * 200_000, b"x: y\n" * 2_000_000, b"{" * 50_000, b"defaultPe: !!python/object:os {}",
        b"-----BEGIN PRIVATE KEY-----\nMIIEvQ", b"\xff\xfe\x00", b"",
    )  # fmt: skip
    good = here.agent.config.read_text(encoding="utf-8")
    with here.stays_registered():
        for content in contents:
            here.agent.config.write_bytes(content)
            await asyncio.sleep(1.5)
            assert here.kubelet.plugins.value[RESOURCE].connected
    assert "MIIEvQ" not in here.said()
    here.agent.config.write_text(f"{good}defaultPe: Single\n", encoding="utf-8")
    here.devices = 4
    await here.well()


@attack()
async def values_that_are_none(here: World) -> None:
    """24 values that are no good: infinite, not a number, of another type, twice, with newlines.

    Each is refused with its line; the last good config stays in force.
    """
    for value in VALUES:
        size = len(here.said())
        here.configure(value)
        await here.logged("the config file is refused", size)


@attack(short=True)
async def config_file_is_something_else(here: World) -> None:
    """The config file is a folder, a pipe, a link to itself, to /dev/zero, a sparse 4 GiB, missing.

    The last good config stays in force; the next good one is taken; at most 16 MiB more memory.
    """
    file = here.agent.config
    with here.grows_by(16):
        for what in ("folder", "pipe", "loop", "/dev/zero", "sparse", "missing"):
            with replaced(file, what):
                await asyncio.sleep(1.5)
        file.write_text(f"{file.read_text(encoding='utf-8')}defaultPe: Single\n", encoding="utf-8")
        here.devices = 4
        await here.well()


@attack(short=True)
async def config_map_is_swapped(here: World) -> None:
    """The config file is a ConfigMap's (`..data` links), swapped 100 times, dangling in between.

    The last one is in force.
    """
    file = here.agent.config
    good, directory = file.read_text(encoding="utf-8"), file.parent
    data = directory / "..data"
    file.unlink()
    file.symlink_to("..data/config.yaml")
    for number in range(100):
        version = directory / f"..version{number}"
        version.mkdir()
        words = ("defaultPe: Fusion", "defaultPe: Sinlge", "defaultPe: Single")[number % 3]
        (version / "config.yaml").write_text(f"{good}{words}\n# {number}\n", encoding="utf-8")
        if number % 5 == 0:
            data.unlink(missing_ok=True)
            await asyncio.sleep(0.1)
        beside = directory / "..data_tmp"
        beside.symlink_to(version.name)
        beside.replace(data)
        await asyncio.sleep(0.05)
    (directory / "..version99/config.yaml").write_text(
        f"{good}defaultPe: Single\n", encoding="utf-8"
    )
    here.devices = 4
    await here.well()
    await asyncio.sleep(2)


@attack(short=True)
async def many_disabled_devices(here: World) -> None:
    """A config with 9,000 disabled devices, which is a legal one.

    Less than 20 kB of log; every probe is answered meanwhile.
    """
    size = len(here.said())
    names = ", ".join(f"{{devName: npu{number}}}" for number in range(10, 9010))
    here.configure(f"disabledDevices: [{names}]\ndefaultPe: Single")
    for _ in range(16):
        assert await here.alive()
        await asyncio.sleep(0.5)
    await here.healthy(4)
    said = len(here.said()) - size
    assert said < 20_000, f"{said} characters of log"
    here.configure("")
    await here.well()


@attack(short=True)
async def edits_without_end(here: World) -> None:
    """A hundred edits of the config in five seconds.

    The last one is in force.
    """
    for number in range(100):
        here.configure(f"defaultPe: {('Single', 'Fusion')[number % 2]}")
        await asyncio.sleep(0.05)
    here.configure("defaultPe: Single")
    here.devices = 4
    await here.well()
