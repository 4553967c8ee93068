"""Names to addresses for aiohttp, which is imported with this module.

aiohttp's own resolver has asyncio's default executor, which the exit waits for: 16 s with a DNS
server that never answers.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult

from npu_agent.threads import DaemonThread


class Resolver(AbstractResolver):
    """Asks the system, on a thread that nothing waits for."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        ask = partial(
            socket.getaddrinfo,
            host,
            port,
            family=family,
            type=socket.SOCK_STREAM,
            flags=socket.AI_ADDRCONFIG,
        )
        found = await asyncio.get_running_loop().run_in_executor(DaemonThread("npu-resolve"), ask)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """There is nothing to close."""
