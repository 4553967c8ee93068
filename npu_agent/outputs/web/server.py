"""The HTTP server: listens on its address and serves the pages, or logs why it cannot."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from operator import is_not
from typing import TYPE_CHECKING

from npu_agent.backoff import Backoff
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.threads import DaemonThread

if TYPE_CHECKING:
    from npu_agent.outputs.web.authorization import Authorizer
    from npu_agent.outputs.web.pages import Answering
    from npu_agent.outputs.web.tls import Certificates

log = logger(__name__)

MOST = 64
"""Open connections of a port."""
_RESOLVE = 5.0
"""Seconds for a host's name to be resolved."""
_FIRST, _LONGEST = 0.5, 5.0
"""Seconds between tries: an older instance in the host's network ends within a minute."""
_RESOLVER = DaemonThread("npu-resolve")
"""Resolving a name blocks, and may hang."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT, errno.ENOPROTOOPT)


class Server:
    """Answers on an address while it runs; `listening` is that address."""

    def __init__(
        self,
        address: tuple[str, int],
        answering: Answering,
        *,
        most: int = MOST,
        silence: float = 30.0,
        what: str = "metrics and status",
        key: str = "metrics.listen",
        certificates: Certificates | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            address: host "" is every interface, port 0 any port.
            answering: gives the answers.
            most: open connections; a newer one takes the place of one that is silent.
            silence: seconds a client may take to send a request, the first or the next.
            what: is served there, for the log.
            key: where the config has the address.
            certificates: for TLS, which `run` waits for; None: without TLS.
            authorizer: asked about each request; None: everybody may have every page.
        """
        self.listening: Feed[tuple[str, int] | None] = Feed(None)
        """Host and port; None while it does not listen."""
        self.made_room = 0
        """Connections that were ended for newer ones."""
        self._address = address
        self._answering = answering
        self._most = most
        self._silence = silence
        self._certificates = certificates
        self._authorizer = authorizer
        self._what = what
        self._key = key

    async def run(self) -> None:
        """Serves until cancelled; a port that is taken is tried again and again."""
        # On a thread: aiohttp takes long to import, and the kubelet waits for the loop.
        # A daemon thread, as it may have to wait for another one that imports, and hangs.
        await asyncio.get_running_loop().run_in_executor(
            DaemonThread("npu-import"), import_module, "npu_agent.outputs.web.connections"
        )
        from npu_agent.outputs.web.connections import Connections

        connections = Connections(
            self._answering,
            self._authorizer,
            most=self._most,
            silence=self._silence,
            made_room=self._count,
        )
        contexts = self._certificates.context if self._certificates else None
        if contexts is not None:
            await contexts.until(lambda context: context is not None)
        sockets = await self._bound()
        try:
            host, port = sockets[0].getsockname()[:2]
            log.info("serving %s", self._what, address=_shown((host, port)))
            while True:
                context = contexts.value if contexts else None
                async with connections.serving(sockets, context):
                    self.listening.publish((host, port))
                    if contexts is None:
                        await asyncio.Event().wait()
                    else:  # all come again under a new certificate, or new authorities of clients
                        await contexts.until(partial(is_not, context))
        finally:
            self.listening.publish(None)
            for each in sockets:
                each.close()

    def _count(self) -> None:
        self.made_room += 1

    async def _bound(self) -> list[socket.socket]:
        """The listening sockets, as soon as they can be opened."""
        pause = Backoff(first=_FIRST, longest=_LONGEST)
        logged = ""
        while True:
            try:
                return await listen(self._address)
            except OSError as error:
                reason = explained(error, self._key)
                if reason != logged:
                    logged = reason
                    log.error(
                        "%s cannot be served: trying again",
                        self._what,
                        address=_shown(self._address),
                        reason=reason,
                    )
            await asyncio.sleep(pause.next())


async def listen(address: tuple[str, int]) -> list[socket.socket]:
    """Listens on every address that `address` stands for.

    Raises:
        OSError: it cannot; no socket is left open. A TimeoutError: the host's name is not resolved
            before the deadline.
    """
    host, port = address
    if not host:
        return [_everywhere(port)]
    found = await _RESOLVER.call(
        partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM), deadline=_RESOLVE
    )
    sockets: list[socket.socket] = []
    trouble: OSError | None = None
    with ExitStack() as opened:
        for family, number in dict.fromkeys((entry[0], str(entry[4][0])) for entry in found):
            try:
                one = socket.create_server((number, port), family=family)
            except OSError as error:  # localhost is ::1 even where there is no IPv6
                if error.errno not in _NO_IPV6:
                    raise
                trouble = error
            else:
                sockets.append(opened.enter_context(one))
                port = one.getsockname()[1]
        if trouble is not None and not sockets:
            raise trouble
        opened.pop_all()
    return sockets


def _everywhere(port: int) -> socket.socket:
    """Every interface by IPv6 and IPv4, or by IPv4 alone where there is no IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return socket.create_server(("", port))


def _shown(address: tuple[str, int]) -> str:
    """As the config writes it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def explained(error: OSError, key: str) -> str:
    """Why the address in the config's `key` cannot be used, with the remedy."""
    if isinstance(error, socket.gaierror):
        return f"the host's name cannot be resolved ({error.strerror}): see {key}"
    match error.errno:
        case errno.ETIMEDOUT:
            return f"the host's name is not resolved: give {key} a numeric address"
        case errno.EADDRINUSE:
            return (
                "the port is taken by another program, or by another npu-agent in this network "
                f"(with hostNetwork, any on this node): give {key} another one"
            )
        case errno.EACCES | errno.EPERM:
            return f"the agent may not use ports below 1024: give {key} a higher one"
        case errno.EADDRNOTAVAIL:
            return f"this host has no such address: give {key} one that it has, or none"
    return f"{error.strerror}: see {key}"
