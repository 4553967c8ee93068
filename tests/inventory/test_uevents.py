"""The kernel's own events: a real netlink socket, and a network device that a test makes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from npu_agent.inventory.uevents import KernelEvents, KernelNews
from tests.until import until


@asynccontextmanager
async def following(*classes: str) -> AsyncIterator[KernelEvents]:
    kernel = KernelEvents(classes)
    running = asyncio.create_task(kernel.run())
    try:
        await kernel.news.until(lambda news: news.is_open or news.trouble)
        yield kernel
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Sent:
    """A socket that has received what a test says: message and sender, or an error."""

    def __init__(self, *received: tuple[bytes, int] | OSError) -> None:
        self._received = list(received)

    def recvfrom(self, _: int) -> tuple[bytes, tuple[int, int]]:
        if not self._received:
            raise BlockingIOError
        first = self._received.pop(0)
        if isinstance(first, OSError):
            raise first
        return first[0], (first[1], 1)


CARD = b"add@/devices/virtual/rngd_mgmt/rngd!npu0mgmt\0ACTION=add\0SUBSYSTEM=rngd_mgmt\0SEQNUM=7\0"


@pytest.mark.parametrize(
    ("received", "heard"),
    [
        ((CARD, 0), 1),
        ((CARD.replace(b"=rngd_mgmt", b"=block"), 0), 0),
        ((CARD, 4711), 0),  # a process that calls itself the kernel
        ((b"\xff\x00garbage", 0), 0),
        (OSError(errno.ENOBUFS, "lost"), 1),  # any of them may have been ours
    ],
)
def test_events_of_our_drivers_by_the_kernel_count(
    received: tuple[bytes, int] | OSError, heard: int
) -> None:
    kernel = KernelEvents(["rngd_mgmt", "npu_mgmt"])
    kernel._receive(Sent(received))  # type: ignore[arg-type]
    assert kernel.news.value.heard == heard


async def test_a_kernel_that_cannot_be_heard_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    caplog.set_level("INFO")
    monkeypatch.setattr(socket, "socket", refused)
    async with following("rngd_mgmt") as kernel:
        assert kernel.news.value == KernelNews(trouble="Operation not permitted")
    assert caplog.messages == ["the kernel reports no cards: the agent searches more often"]


NULL = Path("/sys/class/mem/null/uevent")


@pytest.mark.skipif(not os.access(NULL, os.W_OK), reason="has the kernel send an event: root")
async def test_the_kernel_is_heard() -> None:
    """`mem` stands for a driver's class: the kernel repeats the event of a device on request."""
    async with following("mem") as kernel:
        assert kernel.news.value.is_open
        NULL.write_text("change", encoding="utf-8")
        await until(lambda: kernel.news.value.heard)
