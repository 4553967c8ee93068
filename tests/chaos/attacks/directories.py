"""Attacks on the directories that the agent shares: sockets, lock, record, CDI specs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from npu_agent.outputs.labels import outputs
from tests.chaos.attacks.process import killed_and_served
from tests.chaos.table import attack
from tests.chaos.world import World, become, cores, remove

LOCK, RECORD = ".npu-agent.lock", ".npu-agent.ledger.json"
CDI = "allocation: {method: cdi}\n"


def victim(here: World) -> Path:
    """A file of somebody else's."""
    path = here.root.parent / "victim"
    path.write_text("precious", encoding="utf-8")
    path.chmod(0o600)
    return path


def unharmed(path: Path) -> None:
    """It is as it was."""
    assert path.read_text(encoding="utf-8") == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@contextlib.contextmanager
def small(directory: Path) -> Iterator[None]:
    """The kubelet's directory is a file system of 64 KiB, and full."""
    plugins = directory / "plugins"
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(plugins)]
    subprocess.run(mount, check=True)
    try:
        fill(plugins)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(plugins)], check=True)


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "full").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """The directory is mounted once more, read-only, over what was there."""
    path = str(directory)
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@attack(short=True, root=True, prepare=small)
async def disk_is_full_and_read_only(here: World) -> None:
    """The disk with the device-plugins directory is full from the start on, then read-only.

    Registered; Pods get NPUs; the config is followed; all is well at the end.
    """
    await here.pod()
    here.configure("defaultPe: Single")
    await here.healthy(4)
    (here.plugins / "full").unlink()
    with read_only(here.plugins):
        here.configure("defaultPe: Fusion")
        await here.well()
        here.configure("defaultPe: Single")
        await here.healthy(4)
    here.configure("")
    await here.well()


@attack(short=True)
async def sockets_are_removed(here: World) -> None:
    """The agent's socket is removed, three times.

    A new one each time, registered.
    """
    for _ in range(3):
        async with here.registers():
            for path in here.plugins.glob("furiosa-npu*"):
                path.unlink()


@attack(short=True)
async def directory_is_emptied(here: World) -> None:
    """All files of the device-plugins directory are removed while a Pod runs.

    Registered with the next kubelet; the Pod's card is handed out to nobody.
    """
    grant = await here.granted("runs-on")
    for path in here.plugins.iterdir():
        path.unlink()
    await here.restart_kubelet()
    other = await here.granted("another")
    assert not cores(other) & cores(grant), "handed out twice"


@attack()
async def directory_is_moved(here: World) -> None:
    """The device-plugins directory is moved away for five seconds, and comes back.

    Registered again.
    """
    away = here.plugins.with_name("away")
    here.plugins.rename(away)
    await asyncio.sleep(5)
    away.rename(here.plugins)
    await here.restart_kubelet()


@attack(short=True)
async def links_are_planted(here: World) -> None:
    """Lock and record are links to a file of somebody else's, at the next agent's start.

    That file is not written, nor read, nor changed; the lock is not taken for one.
    """
    precious = victim(here)
    await here.kill()
    for name in (LOCK, RECORD):
        (here.plugins / name).unlink(missing_ok=True)
        (here.plugins / name).symlink_to(precious)
    await here.start_again()
    await asyncio.sleep(5)
    unharmed(precious)
    assert "precious" not in here.said()
    (here.plugins / LOCK).unlink(missing_ok=True)
    await here.well()
    unharmed(precious)


@attack()
async def lock_is_something_else(here: World) -> None:
    """The lock is removed, a pipe, a folder, 4 GiB, noise, while two more agents come and go.

    One agent serves at the end, and no core twice.
    """
    grant = await here.granted("runs-on")
    lock = here.plugins / LOCK
    for bad in ("missing", "pipe", "folder", "sparse", "noise"):
        become(lock, bad)
        with here.agent.another():
            await asyncio.sleep(2)
        remove(lock)
    await killed_and_served(here, grant.ids, 1)


RECORDS = (
    b"", b"null", b"[" * 100_000, b"\x00\xff" * 5000, b'{"version": 99}',
    b'{"version": 1, "footprints": {"a": {"keys": 7, "cores": "x"}}}',
)  # fmt: skip


@attack()
async def record_is_damaged(here: World) -> None:
    """The record of who holds what is noise, cut off, another type, of the future, as agents start.

    The next agent serves the other card, and not that of the Pod that runs on.
    """
    grant = await here.granted("runs-on")
    record = here.plugins / RECORD
    good = record.read_bytes() if record.exists() else b"{}"
    for content in (*RECORDS, good[: len(good) // 2]):
        await here.kill()
        record.write_bytes(content)
        await killed_and_served(here, grant.ids, 0)


@attack()
async def record_is_something_else(here: World) -> None:
    """The record is a folder, a pipe, a link to itself, a sparse 4 GiB, when an agent starts.

    The next agent serves the other card; at most the memory of its Pod.
    """
    grant = await here.granted("runs-on")
    record = here.plugins / RECORD
    for what in ("folder", "pipe", "loop", "sparse"):
        await here.kill()
        become(record, what)
        await here.start_again()
        await asyncio.sleep(3)
        assert here.process.popen.poll() is None
        remove(record)
        await killed_and_served(here, grant.ids, 0)


@attack()
async def foreign_sockets(here: World) -> None:
    """2,500 foreign sockets and files in the device-plugins directory, some with our prefix.

    Registered after a restart, and what is not the agent's stays.
    """
    for number in range(1000):
        (here.plugins / f"foreign-{number}").touch()
        (here.plugins / f"furiosa-npu-{number}.txt").touch()
    with contextlib.ExitStack() as stack:
        for number in range(500):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(here.plugins / f"other-{number}.sock"))
        async with here.registers():
            await here.start_again()
        left = {path.name for path in here.plugins.iterdir()}
    assert {f"foreign-{number}" for number in range(1000)} <= left
    assert {f"furiosa-npu-{number}.txt" for number in range(1000)} <= left
    assert {f"other-{number}.sock" for number in range(500)} <= left


def spec(here: World) -> Path:
    """The agent's CDI spec."""
    (found,) = (here.root / "var/run/cdi").glob("*.json")
    return found


@attack(short=True, config=CDI)
async def cdi_spec_is_damaged(here: World) -> None:
    """The CDI spec is 4 GiB, noise, a link to a file of somebody else's, a pipe, a folder, missing.

    The right one takes its place as soon as it can; the other's file is as it was; at most 16 MiB
    more memory.
    """
    precious, path = victim(here), spec(here)
    good = path.read_bytes()
    with here.grows_by(16):
        for what in ("sparse", "noise", str(precious), "pipe", "folder", "missing"):
            become(path, what)
            await here.fault("npu0", "gone")
            if path.is_dir():
                await here.logged("the CDI specs cannot be written")
                path.rmdir()
            await here.healthy(1)
            await here.fault("npu0", "back")
            await here.well()
            unharmed(precious)
            assert path.read_bytes() == good
            assert not path.is_symlink()


@attack(short=True)
async def feature_file_is_a_link(here: World) -> None:
    """The feature file for Node Feature Discovery is a link to a file of somebody else's.

    The labels take its place; the other's file is as it was.
    """
    file = here.root / outputs.FILE
    file.parent.mkdir(parents=True)
    precious = victim(here)
    file.symlink_to(precious)
    here.configure("labels: {output: nfd}")
    await here.start_again()
    await here.until(lambda: not file.is_symlink(), "a file in place of the link")
    assert b"npu" in file.read_bytes()
    unharmed(precious)
