"""What the running agent reports: its problems come first, and are judged nowhere else.

A command that a report names is shown only if the process that answers is surely the agent: in its
own Pod, or where the agent of this host has the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_agent.core.kinds import LEAD_TO_DOCTOR
from npu_agent.files import regular
from npu_agent.kubelet.lock import Owner, lock_path, read_owner
from npu_agent.outputs.web.server import listen, listen_problem
from npu_agent.people import running
from npu_agent.people.doctor.check import Check, Context, Lines, note, ok, wrong
from npu_agent.people.report import Report, ReportedProblem
from npu_agent.people.running import Answer
from npu_agent.text import one_line

_LONGEST = 1000
"""Characters of a reported text."""
_ELSE = "fix what else is wrong here; the agent tries again by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the running agent says of itself."""

    answers: Mapping[str, Answer]
    """By the key of the address."""
    report: Report | None = None
    unready: tuple[str, ...] | None = None
    """Why it is not ready, where its report cannot be read; None: no agent answers."""


async def reported(context: Context) -> Reported:
    both = running.addresses(context.config.metrics)
    deadline = context.timing.connection
    metrics, probes = both
    results = await asyncio.gather(*(running.who(address, deadline) for address in both))
    answers = {address.key: answer for address, answer in zip(both, results, strict=True)}
    if answers[metrics.key] is Answer.AGENT and (report := await running.status(metrics, deadline)):
        return Reported(answers=answers, report=report)
    # It asks for a token, or is of another version.
    asked = next((at for at in (probes, metrics) if answers[at.key] is Answer.AGENT), None)
    return Reported(
        answers=answers, unready=await running.unready(asked, deadline) if asked else None
    )


async def lines(context: Context) -> Lines:
    agent = await context.probe(reported)
    yield "agent", _agent(context, agent)
    if agent.report is not None:
        for problem in agent.report.problems:
            yield f"agent {one_line(problem.subject)}", _problem(context, problem)
        for problem in agent.report.notes:
            yield f"agent {one_line(problem.subject)}", note(one_line(problem.text, _LONGEST))
    for why in agent.unready or ():
        yield "readiness", wrong(one_line(why, _LONGEST), _ELSE, context.agent_log)
    yield "serving agent", _serving_agent(context)
    for at in running.addresses(context.config.metrics):
        yield at.key, _address(context, at, agent)


def _agent(context: Context, agent: Reported) -> Check:
    if agent.report is not None:
        count = len(agent.report.problems)
        problems = {0: "no problem", 1: "1 problem"}.get(count, f"{count} problems")
        return ok(f"npu-agent {one_line(agent.report.version, 40)} answers: it reports {problems}")
    if agent.unready is not None:
        return ok("an npu-agent answers; its report needs a token or certificate")
    return note(
        "no npu-agent answers here: this host alone is checked",
        "if the agent runs in a Pod, ask there: "
        f"kubectl -n {context.namespace} exec daemonset/npu-agent -- npu-agent doctor",
    )


async def _ours(context: Context) -> bool:
    """Whether the agent of this node listens here, or should."""
    serving = await context.probe_or(owner, None)
    return context.in_pod or (serving is not None and serving.host == context.hostname)


async def _problem(context: Context, problem: ReportedProblem) -> Check:
    remedy = one_line(problem.remedy, _LONGEST) or _ELSE
    command = problem.command
    if problem.kind in LEAD_TO_DOCTOR or not (command.isprintable() and await _ours(context)):
        command = ""
    return wrong(one_line(problem.text, _LONGEST), remedy, command or context.agent_log)


async def _address(context: Context, at: running.Address, agent: Reported) -> Check:
    answer = agent.answers[at.key]
    if answer is Answer.AGENT:
        return ok(f"an npu-agent answers on {at.shown}")
    remedy = _occupied(at) if at.port else ""
    if not remedy:
        return ok(f"{at.shown} is free here")
    taken = ": another program has it" if answer is Answer.OTHER else ""
    detail = f"{at.shown} cannot be used{taken}"
    if answer is Answer.SILENT:
        if at.tls and Answer.AGENT in agent.answers.values():
            return ok(f"{at.shown} takes clients with a certificate only, if it is the agent's")
        detail = f"{at.shown} is taken, and does not answer within {context.timing.connection:g} s"
        remedy = (
            "if an npu-agent has it, its event loop is stuck: its log says where, and in a Pod the "
            f"liveness probe restarts it after half a minute. Else {remedy}"
        )
    if await _ours(context):
        return wrong(detail, remedy, f"ss -ltnp 'sport = :{at.port}'")
    return note(
        detail,
        "not a problem for an agent in a Pod, which has its own ports; for one on this host "
        f"itself: {remedy}",
    )


def _occupied(at: running.Address) -> str:
    """Listens for an instant; returns the remedy if the address is taken, else ""."""
    try:
        listen((at.host, at.port)).close()
    except OSError as error:
        return listen_problem(error, at.key)
    return ""


async def owner(context: Context) -> Owner | None:
    return await context.in_thread(lambda: owner_at(context.directory))


def owner_at(path: Path) -> Owner | None:
    """Returns the holder of the lock here; takes a shared lock for an instant, which is safe."""
    try:
        descriptor = regular(lock_path(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_owner(descriptor)
    finally:
        os.close(descriptor)
    return None


async def _serving_agent(context: Context) -> Check:
    serving = await context.probe(owner)
    if serving is None:
        return note(
            "no npu-agent serves this node now",
            "check that its Pod runs here, unless it is not installed yet or the node has no cards",
        )
    if context.in_pod and serving.host not in (None, context.hostname):
        return note(
            f"{serving}; the agent of this Pod ({context.hostname}) stands by",
            "wait if a rollout is under way; else delete one of two DaemonSets: kubectl get "
            "daemonsets -A | grep npu-agent",
        )
    return ok(str(serving))
