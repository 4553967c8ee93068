"""HTTP into the network namespace of a cluster, from the process that runs the tests.

A socket belongs to the namespace in which it was made, whoever uses it: a thread enters the
cluster's namespace, connects and ends. An answer takes milliseconds of CPU, where a program inside
(kubectl, Python) takes tenths of a second; the tests poll ten times a second, beside the cluster
that they wait for.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12


def connect(pid: int, address: tuple[str, int], timeout: float) -> socket.socket:
    def inside() -> socket.socket:
        with Path(f"/proc/{pid}/ns/net").open(encoding="utf-8") as namespace:
            if _libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        return socket.create_connection(address, timeout)

    # A thread of its own, as it never comes back from there.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside).result()


def ask(
    pid: int,
    method: str,
    url: str,
    body: str | None,
    headers: Mapping[str, str] | None,
    tls: ssl.SSLContext | None,
    timeout: float,
) -> tuple[int, str]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if tls else 80)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    connection.sock = connect(pid, (host, port), timeout)
    try:
        if tls:
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=host)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body and body.encode(), dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
