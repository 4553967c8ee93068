"""metrics.listen: free, held by a running npu-agent (then: is it ready?), or by another program."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from npu_agent.doctor.check import AGENT_LOG, Finding, Lines, Unseen, note, ok, unused, wrong
from npu_agent.doctor.kubelet import owner
from npu_agent.doctor.probe import Process, probe, process
from npu_agent.doctor.situation import Situation
from npu_agent.files import content
from npu_agent.outputs.web.server import explained, listen
from npu_agent.outputs.web.tls import RefusedError, TlsFiles, check, tls_files
from npu_agent.text import reason

_ANSWER = 3.0
"""Seconds for an agent to answer; its own probes give it two."""
_LARGEST = 1 << 18
_LISTENS = b"0A"
"""TCP_LISTEN in /proc/net/tcp."""


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "metrics.listen", _listen(here)
    if files := tls_files(here.config.metrics.tls):
        yield "metrics.tls", _certificate(here, files)
    for why in (await here.see(answer)).unready or ("",):
        yield "readiness", _readiness(here, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Who takes connections at metrics.listen."""

    somebody: bool
    agent: bool = False
    """Whether that is an npu-agent."""
    unready: tuple[str, ...] = ()
    """Its reasons."""


async def answer(here: Situation) -> Answer:
    """Asks for /healthz, and an npu-agent for /readyz."""
    # The probes are answered without TLS and without a token.
    metrics = here.config.metrics
    host, port = metrics.probes_address if tls_files(metrics.tls) else metrics.address
    if not port:
        return Answer(somebody=False)
    status, body = await _get(host or "127.0.0.1", port, "/healthz")
    if status == 200 and body.startswith("ok"):
        _, body = await _get(host or "127.0.0.1", port, "/readyz")
        with suppress(ValueError, TypeError, KeyError):
            unready = tuple(map(str, json.loads(body)["reasons"]))
            return Answer(somebody=True, agent=True, unready=unready)
    return Answer(somebody=status is not None)


async def _get(host: str, port: int, path: str) -> tuple[int | None, str]:
    """Status and body; 0 as the status of what is no answer, None if nobody takes connections."""
    import aiohttp
    from yarl import URL

    url = URL.build(scheme="http", host=host, port=port, path=path)
    limit = aiohttp.ClientTimeout(total=_ANSWER)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as response:
            body = await response.content.read(_LARGEST)
            return response.status, body.decode(errors="replace")
    except TimeoutError:
        return 0, ""  # also before it is connected: a full queue belongs to somebody
    except aiohttp.ClientConnectorError:
        return None, ""
    except aiohttp.ClientError:
        return 0, ""


async def _listen(here: Situation) -> Finding:
    found = await here.see(answer)
    address = here.config.metrics.listen
    if found.agent:
        return ok(f"an npu-agent answers on {address}")
    host, port = here.config.metrics.address
    if not port or not (remedy := await _taken(host, port)):
        return ok(f"{address} is free here")
    holder = await _holder(here.proc, port)
    if found.somebody and holder and holder.runs_an_agent:
        return wrong(
            f"{holder} has {address} and does not answer within {_ANSWER:g} s",
            "its event loop is stuck: its log says where it stood; in a Pod the liveness probe "
            "restarts it after half a minute, elsewhere restart it yourself",
            AGENT_LOG,
        )
    by = f" by {holder}" if holder else ""
    held = f": it is held{by}" if found.somebody or holder else ""
    detail = f"{address} cannot be had{held}"
    agent = await here.see_or(owner, None)
    if here.in_pod or (agent is not None and agent.host == here.hostname):
        return wrong(detail, remedy, f"ss -ltnp 'sport = :{port}'")
    return note(
        detail,
        "no matter for an agent in a Pod, which has ports of its own; for one on this host "
        f"itself: {remedy}",
    )


async def _certificate(here: Situation, files: TlsFiles) -> Finding:
    try:
        expires = await probe(lambda: check(files))
    except (RefusedError, OSError) as error:
        if isinstance(error, RefusedError):
            what, remedy = error.what, error.remedy
        else:
            what, remedy = reason(error), "may the agent read it?"
        if here.in_pod:
            return wrong(what, remedy, f"ls -l {files.cert}")
        return note(what, f"no matter for an agent in a Pod, which has its own Secret: {remedy}")
    days = (expires - time.time()) / 86_400
    return ok(f"{files.cert} is good for {days:.0f} days more")


async def _taken(host: str, port: int) -> str:
    """Takes the address for an instant. Why it cannot be had, and what to do; empty: it can."""
    try:
        for each in await listen((host, port)):
            each.close()
    except OSError as error:
        return explained(error, "metrics.listen")
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
    if not (await here.see(answer)).agent:
        beside = "" if here.in_pod else ": it may have a network of its own; ask in its Pod"
        return unused(f"no npu-agent answers on {here.config.metrics.listen}{beside}")
    if not why:
        return ok("the agent that answers is ready")
    remedy = "reported by the agent itself (/readyz); see its log, and what else is wrong here"
    return wrong(why, remedy, AGENT_LOG)
