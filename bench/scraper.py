"""Asks for pages as Prometheus does, on connections that stay open, and takes the time."""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Mapping

from bench.process import DEADLINE

TEXT: Mapping[str, str] = {"Accept": "text/plain"}
PROMETHEUS: Mapping[str, str] = {
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
}
"""As Prometheus 3 asks."""


class Connection:
    """A connection with one request after the other."""

    def __init__(self, port: int, path: str, headers: Mapping[str, str]) -> None:
        """Connects to this host; asks for nothing yet."""
        lines = [f"GET {path} HTTP/1.1", "Host: bench", *map(": ".join, headers.items()), "", ""]
        self._request = "\r\n".join(lines).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self._answer = bytearray()
        self._whole: int | None = None
        self._began = 0.0

    def ask(self) -> None:
        """Sends the request."""
        self._answer.clear()
        self._whole = None
        self._began = time.perf_counter()
        self.socket.sendall(self._request)

    def take(self) -> float | None:
        """Takes what has come; returns the seconds since `ask` if that was the end of it."""
        if not (piece := self.socket.recv(1 << 20)):
            raise ConnectionError("the server has closed the connection")
        self._answer += piece
        if self._whole is None:
            head, end, _ = self._answer.partition(b"\r\n\r\n")
            if not end:
                return None
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(bytes(head).decode(errors="replace"))
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            self._whole = len(head) + 4 + int(length[1]) if length else 0
        if self._whole:
            done = len(self._answer) >= self._whole
        else:  # in chunks
            done = self._answer.endswith(b"0\r\n\r\n")
        return time.perf_counter() - self._began if done else None


def scrape(
    port: int, path: str, headers: Mapping[str, str], scrapers: int, times: int, pause: float = 0.0
) -> list[float]:
    """So many scrapers at the same time, each `times` times; returns the seconds of each answer."""
    taken: list[float] = []
    with selectors.DefaultSelector() as ready:
        for _ in range(scrapers):
            connection = Connection(port, path, headers)
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.ask()
        left = {key.data: times for key in ready.get_map().values()}
        while left:
            for key, _ in ready.select(DEADLINE):
                connection = key.data
                if (seconds := connection.take()) is None:
                    continue
                taken.append(seconds)
                left[connection] -= 1
                if left[connection]:
                    time.sleep(pause)
                    connection.ask()
                else:
                    del left[connection]
                    ready.unregister(connection.socket)
                    connection.socket.close()
    return taken
