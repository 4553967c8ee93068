"""Hears from the kernel that cards come and go: its uevents, by a netlink socket.

The kernel sends them to each network namespace of the initial user namespace, so to a Pod too,
without hostNetwork and without a capability: lib/kobject_uevent.c, `uevent_net_broadcast_untagged`.
A Pod with `hostUsers: false` gets none, and some sandboxes (gVisor) have no such socket: there the
directories of the drivers are searched at each probe instead.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent import text
from npu_agent.feed import Feed
from npu_agent.logs import logger

log = logger(__name__)

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
"""Group 2 has what udev sends again."""
_LONGEST = 8192
"""Bytes of a message; the kernel's have 2,048 of variables (include/linux/kobject.h) and a path."""
_ALL_IDS = ["0", "0", "4294967295"]
"""The mapping of user IDs in the initial user namespace."""


@dataclass(frozen=True, slots=True)
class KernelNews:
    """What the kernel has said so far."""

    heard: int = 0
    """Events of our drivers; a lost message counts as one."""
    is_open: bool = False
    """Whether cards that come and go are reported here."""
    trouble: str = ""
    """Why they are not, if the system does not let us hear them."""


class KernelEvents:
    """Follows the kernel's events of some classes of devices."""

    def __init__(self, classes: Iterable[str]) -> None:
        """`classes` are names of directories in /sys/class, which events call SUBSYSTEM."""
        self.news: Feed[KernelNews] = Feed(KernelNews())
        self._wanted = tuple(f"SUBSYSTEM={name}".encode() for name in classes)

    async def run(self) -> None:
        """Follows the events while it runs; returns never."""
        try:
            kernel = _opened()
        except OSError as error:
            trouble = text.reason(error)
            log.info("the kernel reports no cards: the agent searches more often", reason=trouble)
            self.news.publish(replace(self.news.value, trouble=trouble))
            await asyncio.Event().wait()
            return

        loop = asyncio.get_running_loop()
        with kernel:
            self.news.publish(replace(self.news.value, is_open=True, trouble=""))
            loop.add_reader(kernel, self._receive, kernel)
            try:
                await asyncio.Event().wait()
            finally:
                loop.remove_reader(kernel)
                self.news.publish(replace(self.news.value, is_open=False))

    def _receive(self, kernel: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                if self._is_ours(kernel):
                    self.news.publish(replace(self.news.value, heard=self.news.value.heard + 1))

    def _is_ours(self, kernel: socket.socket) -> bool:
        try:
            message, (sender, _) = kernel.recvfrom(_LONGEST)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            return True  # messages were lost: any of them may have been ours
        # Processes with the right to send to this group are no kernel.
        return sender == 0 and any(word in self._wanted for word in message.split(b"\0"))


def _opened() -> socket.socket:
    """Raises OSError where no events can be heard."""
    with suppress(FileNotFoundError):
        if Path("/proc/self/uid_map").read_text("ascii").split() != _ALL_IDS:
            raise PermissionError(errno.EPERM, "the Pod has a user namespace (hostUsers: false)")
    kernel = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
    )
    try:
        kernel.bind((0, _KERNEL_GROUP))
    except OSError:
        kernel.close()
        raise
    return kernel
