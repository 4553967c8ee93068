"""Checks of the running agent: its two addresses, and its own report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from npu_agent import typedjson
from npu_agent.outputs.web.authorization import HOW
from npu_agent.outputs.web.report import Report
from npu_agent.outputs.web.server import listen, listen_problem
from npu_agent.outputs.web.tls import RefusedError, TlsFiles, check, tls_files
from npu_agent.people.doctor.check import Check, Lines, note, ok, unused, wrong
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.sockets import owner
from npu_agent.threads import DaemonThread

_LARGEST = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """An address on which an agent listens."""

    key: str
    host: str
    port: int
    shown: str
    tls: bool = False
    clients_need_certificate: bool = False


def pages(context: Context) -> Listener:
    """Returns the listener for Prometheus and people."""
    metrics = context.config.metrics
    files = tls_files(metrics.tls)
    host, port = metrics.address
    return Listener(
        key="metrics.listen",
        host=host,
        port=port,
        shown=metrics.listen,
        tls=files is not None,
        clients_need_certificate=files is not None and files.client_ca is not None,
    )


def probes(context: Context) -> Listener:
    """Returns the kubelet's listener: without TLS and token, even if the other has them."""
    metrics = context.config.metrics
    host, port = metrics.probes_address
    shown = metrics.probes or f":{port}"
    return Listener(key="metrics.probes", host=host, port=port, shown=shown)


async def lines(context: Context) -> Lines:
    yield "metrics.listen", _listener(context, pages(context))
    yield "metrics.probes", _listener(context, probes(context))
    if files := tls_files(context.config.metrics.tls):
        yield "metrics.tls", _certificate(context, files)
    found = await context.probe(report)
    for why in found.unready:
        remedy = "read the agent's log, and fix what else is wrong here (reported by /readyz)"
        own = (one.remedy for one in found.problems if one.unready == why and one.remedy)
        yield "readiness", wrong(why, next(own, remedy), context.agent_log)
    if not found.unready:
        yield "readiness", _ready(context, found)
    for problem in found.problems:
        if not (problem.cards or problem.unready) and problem.subject in _SHOWN:
            yield "agent", note(f"it reports: {problem.text}", problem.remedy)


_SHOWN = ("card", "dra", "assignments", "node")
"""Subjects of problems of which the agent knows more than this report has in other lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a connection to an address."""

    taken: bool
    """Whether some process takes it."""
    agent: bool = False
    """Whether that is an npu-agent."""
    silent: bool = False
    """Whether nothing is answered."""


NO_REPORT = Report(cards=())
"""No agent has answered."""


class _Readiness(msgspec.Struct):
    reasons: tuple[str, ...]


async def answers(context: Context) -> Mapping[str, Answer]:
    """Probes each address; returns the answers by its key."""
    both = (pages(context), probes(context))
    found = await asyncio.gather(*(_who(context, at) for at in both))
    return {at.key: one for at, one in zip(both, found, strict=True)}


async def report(context: Context) -> Report:
    """Returns the running agent's report, or why it is not ready, or nothing."""
    found = await context.probe(answers)
    for at, path in (
        (pages(context), "/status.json"),
        (probes(context), "/readyz"),
        (pages(context), "/readyz"),
    ):
        if not found[at.key].agent:
            continue
        _, body = await _get(context, at, path)
        try:
            if path == "/status.json":
                return typedjson.decode(body, Report)
            return Report(cards=(), unready=typedjson.decode(body, _Readiness).reasons)
        except typedjson.InvalidJsonError:
            continue  # it asks for a token, or is of another version
    return NO_REPORT


async def _who(context: Context, at: Listener) -> Answer:
    if not at.port:
        return Answer(taken=False)
    status, body = await _get(context, at, "/healthz")
    agent = (status == 200 and body.startswith("ok")) or (status == 401 and HOW in body)
    return Answer(taken=status is not None, agent=agent, silent=status == 0)


async def _get(context: Context, at: Listener, path: str) -> tuple[int | None, str]:
    """Status and body; status 0 if the answer is not HTTP, None if no connection is taken."""
    import aiohttp
    from yarl import URL

    scheme = "https" if at.tls else "http"
    url = URL.build(scheme=scheme, host=at.host or "127.0.0.1", port=at.port, path=path)
    limit = aiohttp.ClientTimeout(total=context.timing.connection)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            # Who answers is the question; the certificate has a line of its own.
            session.get(url, ssl=False) as response,
        ):
            body = await response.content.read(-1)
            return response.status, body[:_LARGEST].decode(errors="replace")
    except (TimeoutError, aiohttp.ClientSSLError):
        return 0, ""  # also before it is connected: a full queue belongs to some process
    except aiohttp.ClientConnectorError as error:
        why = error.os_error
        # Any other one is of a process that ends the connection before TLS is agreed on.
        none = isinstance(why, ConnectionRefusedError) or not isinstance(why, ConnectionError)
        return None if none else 0, ""
    except aiohttp.ClientError:
        return 0, ""


async def _listener(context: Context, at: Listener) -> Check:
    both = await context.probe(answers)
    found = both[at.key]
    if found.agent:
        return ok(f"an npu-agent answers on {at.shown}")
    elsewhere = any(one.agent for one in both.values())
    if not at.port or not (remedy := await _occupied(at)):
        if elsewhere and at.port:
            return note(
                f"no process takes connections on {at.shown}, while an npu-agent answers on its "
                "other address",
                "read its log: it waits for a good certificate (metrics.tls), or has another "
                "configuration",
            )
        return ok(f"{at.shown} is free here")
    if found.taken and at.clients_need_certificate and elsewhere:
        return ok(f"{at.shown} takes clients with a certificate only, if it is the agent's")
    command = f"ss -ltnp 'sport = :{at.port}'"
    if found.silent:
        detail = f"{at.shown} is taken, and does not answer within {context.timing.connection:g} s"
        stuck = (
            "if an npu-agent has it, its event loop is stuck: its log says where, and in a Pod the "
        )
        remedy = f"{stuck}liveness probe restarts it after half a minute. Else {remedy}"
    else:
        detail = f"{at.shown} cannot be used{': another program has it' if found.taken else ''}"
    agent = await context.probe_or(owner, None)
    if context.in_pod or (agent is not None and agent.host == context.hostname):
        return wrong(detail, remedy, command)
    elsewhere_fine = "not a problem for an agent in a Pod, which has its own ports"
    return note(detail, f"{elsewhere_fine}; for one on this host itself: {remedy}")


async def _certificate(context: Context, files: TlsFiles) -> Check:
    """Reads the files here: an agent that needs client certificates refuses the doctor."""
    try:
        expires = await context.in_thread(lambda: check(files))
    except RefusedError as error:
        if context.in_pod:
            return wrong(error.what, error.remedy, f"openssl x509 -noout -dates -in {files.cert}")
        elsewhere = "not a problem for an agent in a Pod, which has its own Secret"
        return note(error.what, f"{elsewhere}: {error.remedy}")
    days = (expires - time.time()) / 86_400
    return ok(f"{files.cert} is good for {days:.0f} days more")


async def _occupied(at: Listener) -> str:
    """Listens for an instant; returns the remedy if the address is taken, else ""."""
    try:
        for each in await listen((at.host, at.port), DaemonThread("npu-resolve"), 5.0):
            each.close()
    except OSError as error:
        return listen_problem(error, at.key)
    return ""


def _ready(context: Context, found: Report) -> Check:
    if found is not NO_REPORT:
        return ok("the agent that answers is ready")
    in_pod = "" if context.in_pod else ": it may have a network of its own; ask in its Pod"
    return unused(f"no npu-agent answers on {probes(context).shown}{in_pod}")
