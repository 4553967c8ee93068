"""metrics.listen: free, held by a running npu-agent (then: is it ready?), or by another program."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from npu_agent.doctor.check import (
    Check,
    Finding,
    Unseen,
    have,
    line,
    note,
    ok,
    unused,
    wrong,
)
from npu_agent.doctor.probe import Process, probe, process
from npu_agent.doctor.situation import Situation
from npu_agent.files import content
from npu_agent.kubelet.ownership import Owner
from npu_agent.outputs.web.server import explained, listen

_ANSWER = 3.0
"""Seconds for an agent to answer; its own probes give it two."""
_LARGEST = 1 << 18
_LISTENS = b"0A"
"""TCP_LISTEN in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What was seen of metrics.listen."""

    agent: bool = False
    """Whether an npu-agent answers there."""
    unready: tuple[str, ...] = ()
    """Its reasons."""
    free: bool = False
    remedy: str = ""
    """Why the address cannot be had, and what to do about it."""
    holder: Process | None = None
    """Who has it; None where that cannot be seen."""
    answers: bool = False
    """Whether somebody takes connections there."""


async def serving(situation: Situation) -> Serving | Unseen:
    """Asks who is there; if nobody, takes the address for an instant."""
    host, port = situation.config.metrics.address
    if not port:
        return Serving(free=True)
    status, body = await _get(host or "127.0.0.1", port, "/healthz")
    if status == 200 and body.startswith("ok"):
        _, body = await _get(host or "127.0.0.1", port, "/readyz")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return Serving(agent=True, unready=tuple(map(str, json.loads(body)["reasons"])))
    try:
        for each in await listen((host, port)):
            each.close()
    except OSError as error:
        # Not Unseen: whether it can be had is the question.
        holder = await probe(lambda: _holder(situation.proc, port))
        return Serving(
            remedy=explained(error),
            holder=None if isinstance(holder, Unseen) else holder,
            answers=status is not None,
        )
    return Serving(free=True)


async def _get(host: str, port: int, path: str) -> tuple[int | None, str]:
    """Status and body; 0 as the status of what is no answer, None if nobody takes connections.

    By hand: what listens there may be anything, and aiohttp is not needed for one line.
    """
    status: int | None = None
    try:
        async with asyncio.timeout(_ANSWER):
            reader, writer = await asyncio.open_connection(host, port, limit=_LARGEST)
            status = 0
            with closing(writer):
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
                )
                raw = await reader.read(_LARGEST)
                while more := await reader.read(_LARGEST - len(raw)):
                    raw += more
    except TimeoutError:
        return 0, ""  # also before it is connected: a full queue belongs to somebody
    except OSError:
        return status, ""
    head, _, body = raw.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, body.decode(errors="replace")


def _holder(proc: Path, port: int) -> Process | None:
    """The process that listens on a port; root sees those of all users. May block."""
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
    with contextlib.suppress(OSError):
        for each in directory.iterdir():
            with contextlib.suppress(OSError):
                yield str(each.readlink())


def checks(situation: Situation, found: Serving | Unseen, owner: Owner | None) -> Iterator[Check]:
    """What it means. `owner` is the agent that serves this node."""
    yield line("metrics.listen", _of_address, situation, found, owner)
    if isinstance(found, Unseen):
        return
    for reason in found.unready or ("",):
        yield line("readiness", _of_readiness, situation, found, reason)


def _of_address(situation: Situation, probed: Serving | Unseen, owner: Owner | None) -> Finding:
    found, listen = have(probed), situation.config.metrics.listen
    if found.agent:
        return ok(f"an npu-agent answers on {listen}")
    if found.free:
        return ok(f"{listen} is free here")
    if found.answers and found.holder and found.holder.runs_an_agent:
        return wrong(
            f"{found.holder} has {listen} and does not answer within {_ANSWER:g} s",
            "its event loop is stuck: its log says where it stood; in a Pod the liveness probe "
            "restarts it after half a minute, elsewhere restart it yourself",
        )
    by = f" by {found.holder}" if found.holder else ""
    held = f": it is held{by}" if found.answers or by else ""
    detail = f"{listen} cannot be had{held}"
    if situation.in_pod or (owner is not None and owner.host == situation.hostname):
        return wrong(detail, found.remedy)
    return note(
        detail,
        "no matter for an agent in a Pod, which has ports of its own; for one on this host "
        f"itself: {found.remedy}",
    )


def _of_readiness(situation: Situation, found: Serving, reason: str) -> Finding:
    if not found.agent:
        beside = "" if situation.in_pod else ": it may have a network of its own; ask in its Pod"
        return unused(f"no npu-agent answers on {situation.config.metrics.listen}{beside}")
    if not reason:
        return ok("the agent that answers is ready")
    return wrong(reason, "reported by the agent itself (/readyz); see its log and the lines above")
