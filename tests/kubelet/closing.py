"""A server that closes each connection as soon as it has accepted it, as its client meets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from grpclib.protocol import H2Protocol


def closed_when_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each connection of the running loop closed before anything is sent on it."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection

    async def connect_and_be_closed(
        factory: Callable[[], H2Protocol], path: str, **_: object
    ) -> tuple[asyncio.Transport, H2Protocol]:
        transport, protocol = await connect(factory, path)
        while not protocol.connection.is_closing():
            await asyncio.sleep(0.001)
        return transport, protocol

    monkeypatch.setattr(loop, "create_unix_connection", connect_and_be_closed)
