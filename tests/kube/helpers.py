"""An API server for one test, that answers what it is told to; certificates; kubeconfigs."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from npu_agent.kube import Api
from npu_agent.kube.credentials import of_kubeconfig
from npu_agent.people.simulator.apiserver import served
from tests.outputs.web import certificates

DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""
SLICE: dict[str, Any] = {
    "kind": "ResourceSlice",
    "metadata": {"name": "s", "resourceVersion": "7"},
    "spec": {
        "driver": "npu.example.com",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
    },
}
NODE: dict[str, Any] = {
    "kind": "PartialObjectMetadata",
    "apiVersion": "meta.k8s.io/v1",
    "metadata": {
        "name": "n1",
        "uid": "7b0c",
        "resourceVersion": "42",
        "labels": {"kubernetes.io/hostname": "n1", "npu.count": "2"},
        "managedFields": [
            {
                "manager": "npu-agent",
                "operation": "Apply",
                "apiVersion": "v1",
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:metadata": {"f:labels": {"f:npu.count": {}}}},
            }
        ],
    },
}

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def jwt(claims: object) -> str:
    """An unsigned token of a service account, with these claims."""
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{body}.signature"


def says(
    body: object, status: int = 200, headers: dict[str, str] | None = None, **kwargs: Any
) -> Reply:
    """A reply with the JSON of `body`, or the text or bytes that it is."""
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    data = content.encode() if isinstance(content, str) else content

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=data, status=status, headers=headers, **kwargs)

    return reply


def failure(code: int, message: str) -> dict[str, Any]:
    """The Status by which Kubernetes refuses."""
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}


def status(code: int, message: str, **headers: str) -> Reply:
    """A reply with such a Status."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return says(failure(code, message), code, named)


async def hangs(_: web.Request) -> web.StreamResponse:
    """Never replies."""
    await asyncio.Event().wait()
    raise AssertionError


async def drops(request: web.Request) -> web.StreamResponse:
    """Ends the connection before there is an answer."""
    if request.transport:
        request.transport.close()
    return web.Response()


@dataclass(frozen=True)
class Asked:
    """A request as it came in."""

    method: str
    path: str
    query: list[tuple[str, str]]
    headers: dict[str, str]
    body: bytes


class Server:
    """Answers with `replies` in turn; with the last one for good."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.replies: list[Reply] = []
        self.url = ""

    @property
    def tokens(self) -> list[str | None]:
        """The Authorization of each request."""
        return [asked.headers.get("Authorization") for asked in self.asked]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            Asked(
                request.method,
                request.path,
                list(request.query.items()),
                dict(request.headers),
                await request.read(),
            )
        )
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return await reply(request)


@asynccontextmanager
async def serving(*replies: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    server.replies = list(replies)
    async with served(server.handle, tls) as server.url:
        yield server


async def drops_amid(request: web.Request) -> web.StreamResponse:
    """Ends the connection in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"kind": ')
    assert request.transport
    request.transport.close()
    return response


def kubeconfig(
    directory: Path,
    server: str,
    *,
    user: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
) -> Path:
    path = directory / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "secret"} if user is None else user}],
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def client(path: Path, deadline: float = DEADLINE) -> Api:
    """Asks the server of a kubeconfig."""
    return Api(lambda: of_kubeconfig(str(path)), deadline=deadline)


class Authority(certificates.Authority):
    """Has signed a certificate for an API server."""

    def context(self) -> ssl.SSLContext:
        """For a server on 127.0.0.1."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "server.crt", self.directory / "server.key")
        return context


def authority(directory: Path, names: str = "IP:127.0.0.1") -> Authority:
    """A new one, without a key usage, as many tools make them; `names` are the server's."""
    certificates.authority(directory, usage=()).sign("server", names=names)
    return Authority(directory)
