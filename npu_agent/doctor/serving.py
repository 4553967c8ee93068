"""Its two addresses: free, a running npu-agent's (is it ready?), or another program's."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from npu_agent.doctor.check import SUDO, Finding, Lines, Unseen, note, ok, unknown, unused, wrong
from npu_agent.doctor.kubelet import owner
from npu_agent.doctor.probe import Process, probe, process
from npu_agent.doctor.situation import Situation
from npu_agent.files import content
from npu_agent.outputs.web.authorization import HOW
from npu_agent.outputs.web.server import explained, listen
from npu_agent.outputs.web.tls import RefusedError, TlsFiles, check, tls_files

_ANSWER = 3.0
"""Seconds for an agent to answer; its own probes give it two."""
_LARGEST = 1 << 18
_LISTENS = b"0A"
"""TCP_LISTEN in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """An address on which an agent listens."""

    key: str
    """Where the config has it."""
    host: str
    port: int
    shown: str
    """As the config writes it."""
    tls: bool = False
    closed: bool = False
    """Whether it takes only clients that have a certificate."""


def pages(here: Situation) -> Listener:
    """For Prometheus and people."""
    metrics = here.config.metrics
    files = tls_files(metrics.tls)
    host, port = metrics.address
    return Listener(
        key="metrics.listen",
        host=host,
        port=port,
        shown=metrics.listen,
        tls=files is not None,
        closed=files is not None and files.client_ca is not None,
    )


def probes(here: Situation) -> Listener:
    """For the kubelet: without TLS and without a token, whatever the other one asks for."""
    metrics = here.config.metrics
    host, port = metrics.probes_address
    shown = metrics.probes or f"{metrics.listen.rpartition(':')[0]}:{port}"
    return Listener(key="metrics.probes", host=host, port=port, shown=shown)


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "metrics.listen", _listen(here, pages(here), at_pages, beside=at_probes)
    yield "metrics.probes", _listen(here, probes(here), at_probes, beside=at_pages)
    if files := tls_files(here.config.metrics.tls):
        yield "metrics.tls", _certificate(here, files)
    for why in await here.see(unready) or ("",):
        yield "readiness", _readiness(here, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Who takes connections at an address."""

    somebody: bool
    agent: bool = False
    """Whether that is an npu-agent."""
    unready: tuple[str, ...] | None = None
    """Its reasons; None: it does not show them."""


Asked = Callable[[Situation], Awaitable[Answer]]
"""A probe that finds out who takes connections at one of the addresses."""


async def at_pages(here: Situation) -> Answer:
    """Asks at metrics.listen."""
    return await _asked(pages(here))


async def at_probes(here: Situation) -> Answer:
    """Asks at metrics.probes."""
    return await _asked(probes(here))


async def unready(here: Situation) -> tuple[str, ...] | None:
    """The reasons of the agent that answers; None: none does."""
    for answer in (await here.see(at_probes), await here.see(at_pages)):
        if answer.unready is not None:
            return answer.unready
    return None


async def _asked(at: Listener) -> Answer:
    """Asks for /healthz, and an npu-agent for /readyz."""
    if not at.port:
        return Answer(somebody=False)
    status, body = await _get(at, "/healthz")
    if status == 401 and HOW in body:
        return Answer(somebody=True, agent=True)
    if status == 200 and body.startswith("ok"):
        _, body = await _get(at, "/readyz")
        with suppress(ValueError, TypeError, KeyError):
            reasons = tuple(map(str, json.loads(body)["reasons"]))
            return Answer(somebody=True, agent=True, unready=reasons)
    return Answer(somebody=status is not None)


async def _get(at: Listener, path: str) -> tuple[int | None, str]:
    """Status and body; 0 as the status of what is no answer, None if nobody takes connections."""
    import aiohttp
    from yarl import URL

    scheme = "https" if at.tls else "http"
    url = URL.build(scheme=scheme, host=at.host or "127.0.0.1", port=at.port, path=path)
    limit = aiohttp.ClientTimeout(total=_ANSWER)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            # Who answers is the question; the certificate has a line of its own.
            session.get(url, ssl=False) as response,
        ):
            body = await response.content.read(_LARGEST)
            return response.status, body.decode(errors="replace")
    except TimeoutError:
        return 0, ""  # also before it is connected: a full queue belongs to somebody
    except aiohttp.ClientSSLError:
        return 0, ""
    except aiohttp.ClientConnectorError as error:
        why = error.os_error
        # Any other one is of somebody who ends the connection before TLS is agreed on.
        nobody = isinstance(why, ConnectionRefusedError) or not isinstance(why, ConnectionError)
        return None if nobody else 0, ""
    except aiohttp.ClientError:
        return 0, ""


async def _listen(here: Situation, at: Listener, asked: Asked, *, beside: Asked) -> Finding:
    found = await here.see(asked)
    if found.agent:
        return ok(f"an npu-agent answers on {at.shown}")
    elsewhere = (await here.see(beside)).agent
    if not at.port or not (remedy := await _taken(at)):
        if elsewhere and at.port:
            return note(
                f"nobody takes connections on {at.shown}, while an npu-agent answers on its other "
                "address",
                "it waits for a good certificate (metrics.tls), or has another configuration: see "
                "its log",
            )
        return ok(f"{at.shown} is free here")
    holder = await _holder(here.proc, at.port)
    if found.somebody and holder and holder.runs_an_agent:
        if at.closed and elsewhere:
            return ok(f"{holder} has {at.shown}, and takes clients with a certificate only")
        return wrong(
            f"{holder} has {at.shown} and does not answer within {_ANSWER:g} s",
            "its event loop is stuck: its log says where it stood; in a Pod the liveness probe "
            "restarts it after half a minute, elsewhere restart it yourself",
            here.agent_log,
        )
    if found.somebody and at.closed and elsewhere and not holder and here.uid and not here.in_pod:
        return unknown(
            f"somebody has {at.shown}, and takes clients with a certificate only, if any", SUDO
        )
    by = f" by {holder}" if holder else ""
    held = f": it is held{by}" if found.somebody or holder else ""
    detail = f"{at.shown} cannot be had{held}"
    agent = await here.see_or(owner, None)
    if here.in_pod or (agent is not None and agent.host == here.hostname):
        return wrong(detail, remedy, f"ss -ltnp 'sport = :{at.port}'")
    return note(
        detail,
        "no matter for an agent in a Pod, which has ports of its own; for one on this host "
        f"itself: {remedy}",
    )


async def _certificate(here: Situation, files: TlsFiles) -> Finding:
    try:
        expires = await probe(lambda: check(files))
    except RefusedError as error:
        if here.in_pod:
            return wrong(error.what, error.remedy, f"openssl x509 -noout -dates -in {files.cert}")
        elsewhere = "no matter for an agent in a Pod, which has its own Secret"
        return note(error.what, f"{elsewhere}: {error.remedy}")
    days = (expires - time.time()) / 86_400
    return ok(f"{files.cert} is good for {days:.0f} days more")


async def _taken(at: Listener) -> str:
    """Takes the address for an instant. Why it cannot be had, and what to do; empty: it can."""
    try:
        for each in await listen((at.host, at.port)):
            each.close()
    except OSError as error:
        return explained(error, at.key)
    return ""


async def _holder(proc: Path, port: int) -> Process | None:
    """The process that listens on a port; None where that cannot be seen."""
    with suppress(Unseen):
        return await probe(lambda: _listener(proc, port))
    return None


def _listener(proc: Path, port: int) -> Process | None:
    """As /proc shows it; root sees those of all users."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        for row in (content(proc / table, 1 << 22) or b"").splitlines()[1:]:
            fields = row.split()
            listens = len(fields) > 9 and fields[3] == _LISTENS
            if listens and int(fields[1].rpartition(b":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9].decode()}]")
    for directory in proc.iterdir():
        if directory.name.isdigit() and inodes.intersection(_open_files(directory / "fd")):
            return process(proc, int(directory.name))
    return None


def _open_files(directory: Path) -> Iterator[str]:
    """What a process has open; nothing where we may not see it. Files go while they are listed."""
    with suppress(OSError):
        for each in directory.iterdir():
            with suppress(OSError):
                yield str(each.readlink())


async def _readiness(here: Situation, why: str) -> Finding:
    if await here.see(unready) is None:
        beside = "" if here.in_pod else ": it may have a network of its own; ask in its Pod"
        return unused(f"no npu-agent answers on {probes(here).shown}{beside}")
    if not why:
        return ok("the agent that answers is ready")
    remedy = "reported by the agent itself (/readyz); see its log, and what else is wrong here"
    return wrong(why, remedy, here.agent_log)
