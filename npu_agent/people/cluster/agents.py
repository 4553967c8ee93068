"""Which Pods are agents, and the page of one. Anyone may give a Pod the agent's label."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_agent.cli import CommandError
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.outputs.web.report import Report
from npu_agent.people.cluster.fetch import fetch
from npu_agent.people.cluster.objects import AGENT, Cluster, Pod
from npu_agent.typedjson import InvalidJsonError, convert

_PAGE = 5.0
"""Seconds for a page: the proxy itself would wait 30 for a Node that is gone."""
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


async def status_of(api: Api, node: str) -> dict[str, Any]:
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
    return await _page(api, pods)


async def _page(api: Api, pods: Sequence[Pod]) -> dict[str, Any]:
    """The first page that can be read, by the API server's proxy; else the first error.

    The proxy takes the first port of a Pod, which is that of the pages.
    """
    errors: list[ApiError] = []
    page = Request("get", "Pod", dict[str, Any], subresource="proxy/status.json")
    for pod in pods:
        for scheme in ("", "https:"):
            name = f"{scheme}{pod.name}:"
            try:
                request = replace(page, namespace=pod.namespace, name=name)
                return await api.ask(request, deadline=_PAGE)
            except ApiError as error:
                errors.append(error)
            if errors[-1].kind is ErrorKind.UNAUTHORIZED:
                raise ApiError(
                    f"the agent's page of Pod {pod.key} wants a token (401), which the API "
                    "server's proxy does not pass on",
                    f"run `kubectl -n {pod.namespace} port-forward {pod.name} 9100`, and get "
                    "/status.json with your token",
                    kind=ErrorKind.UNAUTHORIZED,
                )
            if errors[-1].kind in (ErrorKind.FORBIDDEN, ErrorKind.TIMEOUT):
                break
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
            reports[node] = _report(node, await _page(api, only(node, pods)))
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
