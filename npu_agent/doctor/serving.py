"""metrics.listen: free, held by a running npu-agent (then: is it ready?), or somebody else's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.look import content, look, seen
from npu_agent.doctor.situation import Situation
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.outputs.web.server import explained, listen

_ANSWER = 3.0
"""Seconds for an agent to answer; its own probes give it two."""
_LARGEST = 1 << 18
_LISTENS = b"0A"
"""TCP_LISTEN in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What was seen of metrics.listen."""

    agent: bool
    """Whether an npu-agent answers there."""
    unready: tuple[str, ...] = ()
    """Its reasons."""
    free: bool = False
    trouble: str = ""
    """Why it cannot be had, with the remedy."""
    holder: str = ""
    """Who has it instead: ``pid 7: nginx``; empty where that cannot be seen."""
    answers: bool = False
    """Whether somebody takes connections there."""


async def serving(situation: Situation) -> Serving | Unseen:
    """Asks who is there; if nobody, takes the address for an instant."""
    host, port = situation.config.metrics.address
    if not port:
        return Serving(agent=False, free=True)
    status, body = await _get(host or "127.0.0.1", port, "/healthz")
    if status == 200 and body.startswith("ok"):
        _, body = await _get(host or "127.0.0.1", port, "/readyz")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return Serving(agent=True, unready=tuple(map(str, json.loads(body)["reasons"])))
    with closing(Reader("npu-doctor-listen")) as reader:
        try:
            for each in await listen((host, port), reader):
                each.close()
        except (OSError, HungError) as error:
            # Kept apart from `Unseen`: that it cannot be had is what was to be found out.
            holder = await look(lambda: _holder(situation.proc, port))
            return Serving(
                agent=False,
                trouble=explained(error),
                holder=holder if isinstance(holder, str) else "",
                answers=status is not None,
            )
    return Serving(agent=False, free=True)


async def _get(host: str, port: int, path: str) -> tuple[int | None, str]:
    """Status and body; None as the status if nobody takes the connection.

    By hand: what listens there may be anything, and aiohttp is not needed for one line.
    """

    async def ask() -> tuple[int | None, str]:
        async with asyncio.timeout(_ANSWER):
            reader, writer = await asyncio.open_connection(host, port, limit=_LARGEST)
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
                )
                raw = await reader.read(_LARGEST)
                while more := await reader.read(_LARGEST - len(raw)):
                    raw += more
            finally:
                writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        words = head.split(None, 2)
        number = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        return number, body.decode(errors="replace")

    answer = await seen(ask())
    if isinstance(answer, Unseen):
        return (None if "refused" in answer.why else 0), ""
    return answer


def _holder(proc: Path, port: int) -> str:
    """The process that listens on a port; root sees those of all users. May block."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in (content(proc / table, 1 << 22) or b"").splitlines()[1:]:
            fields = line.split()
            listens = len(fields) > 9 and fields[3] == _LISTENS
            if listens and int(fields[1].rpartition(b":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9].decode()}]")
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        if inodes.intersection(_open_files(directory / "fd")):
            words = (content(directory / "cmdline", 256) or b"").replace(b"\0", b" ")
            return f"pid {directory.name}: {words.decode(errors='replace').strip()}"
    return ""


def _open_files(directory: Path) -> Iterator[str]:
    """What a process has open; nothing where we may not see it. Files go while they are listed."""
    with contextlib.suppress(OSError):
        for each in directory.iterdir():
            with contextlib.suppress(OSError):
                yield str(each.readlink())


def checks(situation: Situation, found: Serving | Unseen, owner: str | None) -> Iterator[Check]:
    """What it means. `owner` is the agent that serves this node, as it calls itself."""
    listen = situation.config.metrics.listen
    if isinstance(found, Unseen):
        yield found.check("metrics.listen")
        return
    if found.agent:
        yield Check("metrics.listen", State.OK, f"an npu-agent answers on {listen}")
    elif found.free:
        yield Check("metrics.listen", State.OK, f"{listen} is free here")
    elif found.answers and re.search("npu[-_]agent.* run", found.holder):
        yield Check(
            "metrics.listen",
            State.WRONG,
            f"{found.holder} has {listen} and does not answer within {_ANSWER:g} s",
            "its event loop is stuck: its log says where it stood; in a Pod the liveness probe "
            "starts it anew after half a minute, elsewhere you do",
        )
    else:
        who = f" by {found.holder}" if found.holder else ""
        here = situation.in_pod or (owner is not None and f" on {situation.hostname}," in owner)
        yield Check(
            "metrics.listen",
            State.WRONG if here else State.NOTE,
            f"{listen} cannot be had: it is held{who}"
            if found.answers
            else f"{listen}: not to be had{who}",
            found.trouble
            if here
            else f"no matter for an agent in a Pod, which has ports of its own; for one on this "
            f"host itself: {found.trouble}",
        )
    if not found.agent:
        yield Check(
            "readiness",
            State.UNUSED,
            f"no npu-agent answers on {listen}"
            + ("" if situation.in_pod else ": it may have a network of its own; ask in its Pod"),
        )
    elif not found.unready:
        yield Check("readiness", State.OK, "the agent that answers is ready")
    for reason in found.unready:
        yield Check(
            "readiness",
            State.WRONG,
            reason,
            "the agent says so itself (/readyz); its log and the lines above tell more",
        )
