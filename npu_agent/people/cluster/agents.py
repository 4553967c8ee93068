"""Which Pods are agents, and the page of one. Anyone may give a Pod the agent's label."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npu_agent.cli import CommandError
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.outputs.web.report import Report
from npu_agent.people.cluster.fetch import fetch
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.pods import AGENT, Pod, page_of
from npu_agent.typedjson import InvalidJsonError, convert

_ALL_PAGES = 15.0
"""Seconds for the agents' pages, together."""


@dataclass(frozen=True, slots=True)
class AgentPages:
    """The agents' reports by Node; else the reason why there is none."""

    found: Mapping[str, Report] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    """The user has no right to ask: those that are left were not asked."""


def agents(cluster: Cluster) -> dict[str, list[Pod]]:
    """The agents by Node: Pods of the agent's DaemonSet, two while it is rolled out."""
    by_node: dict[str, list[Pod]] = defaultdict(list)
    for pod in cluster.pods:
        if pod.spec.node_name and any(daemon_set.runs(pod) for daemon_set in cluster.daemon_sets):
            by_node[pod.spec.node_name].append(pod)
    return by_node


def only(node: str, pods: Sequence[Pod]) -> list[Pod]:
    """The agents of a Node, those that are not ending first.

    Raises:
        CommandError: they belong to several DaemonSets.
    """
    owners = {
        ref.uid: pod for pod in pods for ref in pod.metadata.owner_references if ref.controller
    }
    if len(owners) > 1:
        named = " and ".join(sorted(pod.key for pod in owners.values()))
        raise CommandError(
            f"Node {node} has agents of several DaemonSets, {named}: delete the one that is not "
            "npu-agent's, or label its Pods otherwise"
        )
    return sorted(pods, key=lambda pod: bool(pod.metadata.deletion_timestamp))


async def report_of(api: Api, node: str) -> Report:
    """/status.json of the agent on a Node; raises as `status_of`."""
    return _report(node, await status_of(api, node))


async def status_of(api: Api, node: str) -> dict[str, object]:
    """/status.json of the agent on a Node, as it is.

    Raises:
        ApiError: of any kind.
        CommandError: no agent runs there, or several do.
    """
    cluster = await fetch(api, "pods", "daemon_sets", selectors={"pods": AGENT}, node=node)
    for refusal in cluster.refused.values():
        raise ApiError(refusal, kind=ErrorKind.FORBIDDEN)
    pods = only(node, agents(cluster)[node])
    if not pods:
        raise CommandError(
            f"no agent runs on Node {node}: `kubectl get pods -A -o wide -l {AGENT}`"
        )
    return await _first(api, pods)


async def _first(api: Api, pods: Sequence[Pod]) -> dict[str, object]:
    """The first page that can be read; else the first error."""
    errors: list[ApiError] = []
    for pod in pods:
        try:
            return await page_of(api, pod.namespace, pod.name)
        except ApiError as error:
            errors.append(error)
    raise errors[0]


def _report(node: str, status: object) -> Report:
    try:
        return convert(status, Report)
    except InvalidJsonError as error:
        what = f"the page of the agent on Node {node} cannot be used (another version?)"
        raise CommandError(f"{what}: {error}") from error


async def pages(api: Api, of: Mapping[str, Sequence[Pod]]) -> AgentPages:
    """The pages of these agents, by Node; what fails, or takes too long, is in the answer."""
    reports: dict[str, Report] = {}
    failed: dict[str, str] = {}
    refused = ""

    async def ask(node: str, pods: Sequence[Pod]) -> None:
        nonlocal refused
        if refused:
            return
        try:
            reports[node] = _report(node, await _first(api, only(node, pods)))
        except CommandError as error:
            failed[node] = str(error)
        except ApiError as error:
            if error.kind is ErrorKind.FORBIDDEN:
                refused = error.what
            else:
                failed[node] = str(error)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ALL_PAGES):
            await asyncio.gather(*(ask(node, pods) for node, pods in of.items()))
    for node in of.keys() - reports.keys() - failed.keys() if not refused else ():
        failed[node] = f"the agent's page was not read within {_ALL_PAGES:g} s"
    return AgentPages(reports, failed, refused)
