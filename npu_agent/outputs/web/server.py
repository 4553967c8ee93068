"""The HTTP server: listens on its address and serves the pages, or logs why it cannot."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import is_not
from typing import TYPE_CHECKING, Literal

from npu_agent.backoff import Backoff
from npu_agent.feed import Feed
from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread

if TYPE_CHECKING:
    from npu_agent.outputs.web.authorization import Authorizer
    from npu_agent.outputs.web.routes import Router
    from npu_agent.outputs.web.tls import Certificates

log = logger(__name__)

Port = Literal["metrics", "probes"]
_WHAT = {"metrics": "metrics and status", "probes": "probes"}
_KEYS = {"metrics": "metrics.listen", "probes": "metrics.probes"}
_IMPORT = 30.0
"""Seconds; 0.3 on an idle machine."""
_STARTED = 5.0
"""Seconds until the templates are compiled, which takes 0.2 s of the two cores of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    """Limits of a port; times in seconds."""

    connections: int = 64
    """Open ones; a newer one takes the place of the oldest."""
    silence: float = 30.0
    """For a client to send a request, the first or the next."""
    handshake: float = 5.0
    """For a client's TLS handshake."""
    answer: float = 15.0
    """For an answer: the page, the API server's word on the client, and the client's reading."""
    linger: float = 1.0
    """In which an unwanted request body is read, so that its client gets to the answer."""
    ending: float = 0.4
    """To end all connections, also those that clients keep open."""
    retry_first: float = 0.5
    retry_longest: float = 5.0
    """Between tries to listen: an older agent in the host's network ends within a minute."""


class Server:
    """Answers on an address while it runs; `listening` is that address."""

    def __init__(
        self,
        port: Port,
        address: tuple[str, int],
        router: Router,
        limits: PortLimits = PortLimits(),
        certificates: Certificates | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        """Opens nothing before `run`.

        The host "" is every interface, port 0 any port. `run` waits for the `certificates`; None:
        without TLS. Without an `authorizer` everybody may have every page.
        """
        self.listening: Feed[tuple[str, int] | None] = Feed(None)
        self.made_room = 0
        self._port = port
        self._address = address
        self._router = router
        self._limits = limits
        self._certificates = certificates
        self._authorizer = authorizer

    async def run(self) -> None:
        await _load("connections")
        from npu_agent.outputs.web.connections import Connections

        connections = Connections(self._router, self._authorizer, self._limits, self._count)
        contexts = self._certificates.context if self._certificates else None
        if contexts is not None:
            await contexts.until(lambda context: context is not None)
        listener = await self._listen()
        templates = asyncio.create_task(_load_templates())
        try:
            host, port = listener.getsockname()[:2]
            log.info("serving %s", _WHAT[self._port], address=_shown((host, port)))
            while True:
                context = contexts.value if contexts else None
                async with connections.serving(listener, context):
                    self.listening.publish((host, port))
                    if contexts is None:
                        await asyncio.Event().wait()
                    else:  # all come again under a new certificate, or new authorities of clients
                        await contexts.until(partial(is_not, context))
        finally:
            templates.cancel()
            self.listening.publish(None)
            listener.close()

    def _count(self) -> None:
        self.made_room += 1

    async def _listen(self) -> socket.socket:
        pause = Backoff(first=self._limits.retry_first, longest=self._limits.retry_longest)
        words = f"{_WHAT[self._port]} cannot be served; retrying"
        reporter = Reporter(log, words, address=_shown(self._address))
        while True:
            try:
                return listen(self._address)
            except OSError as error:
                reporter.failed(listen_problem(error, _KEYS[self._port]))
            await asyncio.sleep(pause.next())


async def _load(module: str) -> None:
    """Imports a module on a thread: aiohttp and Jinja2 take long, and the loop has other work.

    A daemon thread, as it may have to wait for another one that imports, and hangs.
    """
    load = partial(import_module, f"npu_agent.outputs.web.{module}")
    await DaemonThread().call(load, deadline=_IMPORT)


async def _load_templates() -> None:
    await asyncio.sleep(_STARTED)
    with suppress(OSError):  # the first reader of the page loads them then
        await _load("page")


def listen(address: tuple[str, int]) -> socket.socket:
    """Listens on a numeric address; the host "" is every interface, by IPv4 and IPv6.

    Raises:
        OSError: it cannot be had.
    """
    host, _ = address
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host:
        socket.inet_pton(family, host)  # a name would be resolved, which may hang
    return socket.create_server(address, family=family)


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_problem(error: OSError, key: str) -> str:
    """Why the address in the config's `key` cannot be used, with the remedy."""
    if error.errno == errno.EADDRINUSE:
        return (
            "the port is taken by another program, or by another npu-agent in this network "
            f"(with hostNetwork, any on this node): give {key} another one"
        )
    return f"{error.strerror or error}: correct {key}"
