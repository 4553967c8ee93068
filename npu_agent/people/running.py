"""Asks the running agent: what answers on its two addresses, and its report.

Any process may answer there, so nothing of it is trusted: an answer has a deadline and a bound, and
its words are made fit for a terminal where they are shown.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from npu_agent import typedjson
from npu_agent.config import MetricsConfig
from npu_agent.outputs.web.authorization import HOW
from npu_agent.outputs.web.tls import tls_files
from npu_agent.people.report import Report

_LARGEST = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address on which the agent listens."""

    key: str
    host: str
    port: int
    shown: str
    tls: bool = False


class Answer(enum.Enum):
    """What a connection to an address gave."""

    NONE = "no process takes it"
    SILENT = "a process takes it, and answers nothing, or nothing without a client's certificate"
    AGENT = "an npu-agent answers"
    OTHER = "another process answers"


class _Readiness(msgspec.Struct):
    reasons: tuple[str, ...]


def addresses(metrics: MetricsConfig) -> tuple[Address, Address]:
    """Returns the address for Prometheus and people, and the kubelet's: without TLS and token."""
    tls = tls_files(metrics.tls) is not None
    host, port = metrics.address
    probes_host, probes_port = metrics.probes_address
    shown = metrics.probes or f":{probes_port}"
    return (
        Address(key="metrics.listen", host=host, port=port, shown=metrics.listen, tls=tls),
        Address(key="metrics.probes", host=probes_host, port=probes_port, shown=shown),
    )


async def who(at: Address, deadline: float) -> Answer:
    if not at.port:
        return Answer.NONE
    status, body = await _get(at, "/healthz", deadline)
    if not status:
        return Answer.NONE if status is None else Answer.SILENT
    agent = (status == 200 and body.startswith("ok")) or (status == 401 and HOW in body)
    return Answer.AGENT if agent else Answer.OTHER


async def status(at: Address, deadline: float) -> Report | None:
    """Returns the agent's report; None: no agent answers there, or not to everyone."""
    _, body = await _get(at, "/status.json", deadline)
    try:
        return typedjson.decode(body, Report)
    except typedjson.InvalidJsonError:
        return None


async def unready(at: Address, deadline: float) -> tuple[str, ...] | None:
    _, body = await _get(at, "/readyz", deadline)
    try:
        return typedjson.decode(body, _Readiness).reasons
    except typedjson.InvalidJsonError:
        return None


async def _get(at: Address, path: str, deadline: float) -> tuple[int | None, str]:
    """Status and body; status 0 if the answer is not HTTP, None if no connection is taken."""
    import aiohttp
    from yarl import URL

    scheme = "https" if at.tls else "http"
    url = URL.build(scheme=scheme, host=at.host or "127.0.0.1", port=at.port, path=path)
    limit = aiohttp.ClientTimeout(total=deadline)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            # Who answers is the question; the certificate is the agent's to judge.
            session.get(url, ssl=False, allow_redirects=False) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _LARGEST:
                    return 0, ""
            return response.status, body.decode(errors="replace")
    except (TimeoutError, aiohttp.ClientSSLError):
        return 0, ""  # also before it is connected: a full queue belongs to some process
    except aiohttp.ClientConnectorError as error:
        why = error.os_error
        # Any other one is of a process that ends the connection before TLS is agreed on.
        none = isinstance(why, ConnectionRefusedError) or not isinstance(why, ConnectionError)
        return None if none else 0, ""
    except aiohttp.ClientError:
        return 0, ""
