"""etcd and an API server on ports of this machine: no root, no namespaces, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from tests.cluster.build import ETCD, KUBERNETES, ensure_binaries
from tests.kube.helpers import kubeconfig
from tests.until import until

_TOKEN = "conformance"
_START = 60.0
"""Seconds until it has to answer."""


@dataclass(frozen=True)
class ApiServer:
    """A running one, asked as an administrator; `kubeconfig` is an administrator's."""

    kubeconfig: Path
    audit: Path
    """Its audit log: what it was asked, at level Metadata."""
    session: ClientSession
    process: subprocess.Popen[bytes]

    async def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The object that answers.

        Raises:
            RuntimeError: it refuses; with its words.
        """
        async with self.session.request(method, path, json=body) as answer:
            found: dict[str, Any] = await answer.json()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status}: {found.get('message')}")
            return found

    def stop(self) -> None:
        """It answers no more, and its port is closed; by SIGTERM it would wait for watches."""
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def api_server(directory: Path) -> AsyncIterator[ApiServer]:
    """Starts both in this directory; builds them first where they are in no cache."""
    programs = await asyncio.to_thread(ensure_binaries, KUBERNETES, ETCD)
    server, processes = _start(programs, directory)
    try:
        ca = directory / "certificates" / "apiserver.crt"  # has its authority's, too
        await until(
            lambda: ca.exists() and "-----END" in ca.read_text(encoding="utf-8"), deadline=_START
        )
        async with ClientSession(
            server,
            connector=TCPConnector(ssl=ssl.create_default_context(cafile=ca)),
            headers={"Authorization": f"Bearer {_TOKEN}"},
            timeout=ClientTimeout(30),
        ) as session:
            user, trusts = {"token": _TOKEN}, {"certificate-authority": str(ca)}
            config = kubeconfig(directory, server, user=user, cluster=trusts)
            running = ApiServer(config, directory / "audit.log", session, processes[-1])
            async with asyncio.timeout(_START):
                while not await _answers(running):
                    await asyncio.sleep(0.1)
            yield running
    finally:
        for process in reversed(processes):
            process.kill()  # what they have written is thrown away
            process.wait()


def _start(
    programs: Mapping[str, Path], directory: Path
) -> tuple[str, list[subprocess.Popen[bytes]]]:
    """The API server's address, and both processes, the API server's last."""
    port, etcd, peers = _free_ports(3)
    key = directory / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (directory / "tokens.csv").write_text(
        f'{_TOKEN},admin,admin,"system:masters"\n', encoding="utf-8"
    )
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
    (directory / "audit.yaml").write_text(
        json.dumps(policy | {"omitStages": ["RequestReceived"]}), encoding="utf-8"
    )
    url = f"http://127.0.0.1:{etcd}"
    options = {
        "etcd": [
            f"--data-dir={directory}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        ],
        "kube-apiserver": [
            f"--etcd-servers={url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={directory}/certificates",
            f"--audit-log-path={directory}/audit.log",
            f"--audit-policy-file={directory}/audit.yaml",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=RBAC",
            f"--token-auth-file={directory}/tokens.csv",
            "--service-account-issuer=https://conformance",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        ],
    }
    processes = []
    for name, given in options.items():
        with (directory / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen([programs[name], *given], stdout=log, stderr=log))
    return f"https://127.0.0.1:{port}", processes


async def _answers(server: ApiServer) -> bool:
    with suppress(ClientError, RuntimeError):
        return bool(await server.ask("GET", "/api/v1/namespaces/default"))
    return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
