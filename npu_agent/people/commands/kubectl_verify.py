"""`kubectl npu verify`: runs `npu-agent verify` in a Pod on each Node, on a card that is free.

The Pods have the lowest priority and take no other Pod's place, so that no job waits for them: the
scheduler evicts them for one. They come to a cordoned Node, too, as this is for a Node that is to
be uncordoned. Everything is made and removed with the rights of the person who asks.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.cli import FAILED, WRONG, CommandError
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.errors import NOT_RBAC
from npu_agent.kube.objects import Condition, Object, Plain, Struct
from npu_agent.kube.request import Request
from npu_agent.people.cluster import rows
from npu_agent.people.cluster.fetch import AgentReports, agents, fetch, only, reports
from npu_agent.people.cluster.objects import Cluster, Pod, condition
from npu_agent.people.cluster.proxy import through_kubectl
from npu_agent.people.commands import view
from npu_agent.people.commands.kubectl import WORDS, flags, table
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.people.doctor.check import Check, State
from npu_agent.text import listed, one_line
from npu_agent.vendors import DRA

NAME = "npu-verify"
"""Of the PriorityClass, and of the label that selects the Pods; their own names begin with it."""
PRIORITY = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": NAME},
    "value": -2_000_000_000,
    "preemptionPolicy": "Never",
    "description": "For the Pods of `kubectl npu verify`, which take no other Pod's place.",
}
LABELS = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "npu-agent"}
_EXAMPLE = "k8s/examples/npu-verify.yaml"
_EVERY = 1.0
"""Seconds between two reads of the Pods."""
_LARGEST = 64 * 2**20
"""Bytes of a list of a thousand Pods."""
_COLUMNS = ("node", "card", "result", "finding")


class VerifyStatus(Struct, frozen=True):
    """The status of a Pod that verifies."""

    phase: str = "Pending"
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[Plain, ...] = ()

    @property
    def last(self) -> Plain:
        """How its container has ended, or why it waits: a ``reason``, and a ``message``.

        The message of an end is the end of the log.
        """
        states = [state for of in self.container_statuses for state in of["state"].items()]
        return next((plain for name, plain in states if name != "running"), {})


class VerifyPod(Object, frozen=True):
    """A Pod that verifies, as far as its end is read."""

    status: VerifyStatus = VerifyStatus()


class VerifyPodList(Struct, frozen=True):
    """All of them, of other people as well."""

    items: tuple[VerifyPod, ...] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found on a Node."""

    node: str
    card: str | None
    result: str
    """``passed``, ``failed`` or ``skipped``."""
    finding: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A Node with a free device."""

    node: str
    agent: Pod
    """Whose image is on the Node."""
    resource: str
    """As `rows.free_resource`."""
    namespace: str
    name: str
    """Of the Pod."""

    def manifest(self, args: argparse.Namespace, template: str) -> dict[str, Any]:
        """The Pod: k8s/verify.gotmpl, on this Node, with the lowest priority.

        `template` is the ResourceClaimTemplate of a Pod without a resource.
        """
        here = self.namespace == self.agent.namespace
        limits = {"memory": "128Mi", **({self.resource: "1"} if self.resource else {})}
        claims = [] if self.resource else [{"name": "npu"}]
        profile: dict[str, Any] = {"type": args.seccomp}
        if args.seccomp not in ("Unconfined", "RuntimeDefault"):
            profile = {"type": "Localhost", "localhostProfile": args.seccomp}
        name_is = {"key": "metadata.name", "operator": "In", "values": [self.node]}
        spec = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, round(args.timeout)),
            "terminationGracePeriodSeconds": 1,
            "priorityClassName": NAME,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchFields": [name_is]}]
                    }
                }
            },
            "resourceClaims": [
                {**claim, "resourceClaimTemplateName": template} for claim in claims
            ],
            "containers": [
                {
                    "name": "verify",
                    "image": self.agent.agent_image,
                    "imagePullPolicy": "IfNotPresent",
                    "args": ["verify", "-o", "json"],
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                        "limits": limits,
                        "claims": claims,
                    },
                    "securityContext": {
                        "runAsUser": 0,
                        "runAsGroup": 0,
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": profile,
                    },
                }
            ],
        }
        if here:  # both are of its namespace
            spec["serviceAccountName"] = self.agent.spec.service_account_name
            spec["imagePullSecrets"] = list(self.agent.spec.image_pull_secrets)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": self.namespace, "labels": LABELS},
            "spec": spec,
        }


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if a Node fails, or if one that was named could not be tried."""
    if bool(args.node) is args.all:
        raise CommandError("name the Nodes, or all of those with NPUs by --all", WRONG)
    found: list[Finding] = []
    try:
        code = run_until_signal(_verify(args, found))
    except ApiError as error:
        lacks = error.kind is ErrorKind.FORBIDDEN
        if lacks and (error.remedy != NOT_RBAC or "PriorityClass" in error.what):
            remedy = f"`kubectl apply -f {_EXAMPLE}` makes the ClusterRole and the PriorityClass"
            raise CommandError(f"{error.what}: {remedy}, and says how to bind it") from error
        raise CommandError(str(error)) from error
    bad = ("failed",) if args.all else ("failed", "skipped")
    return code or (FAILED if any(row.result in bad for row in found) else 0)


async def _verify(args: argparse.Namespace, found: list[Finding]) -> None:
    async with through_kubectl(flags(args)) as (api, place):
        print(f"kubectl npu: {place}", file=sys.stderr)
        cluster = await fetch(api, "nodes", "pods", "claims", "slices", "daemon_sets")
        for refusal in cluster.refused.values():
            raise ApiError(refusal, kind=ErrorKind.FORBIDDEN)
        asked = rows.to_ask(cluster, WORDS)
        running = {node: pods for node, pods in agents(cluster).items() if node in asked}
        targets = []
        for target in to_try(cluster, args, await reports(api, running)):
            if isinstance(target, Finding):
                found.append(target)
            else:
                targets.append(target)
        made: list[Request[Any]] = []
        try:
            await _make(api, objects(targets, args) if targets else (), made)
            async for row in _judged(api, targets, args.timeout):
                found.append(row)
                print(f"{row.node}: {row.result}", file=sys.stderr, flush=True)
        finally:
            removing = asyncio.create_task(_remove(api, args, made))
            try:
                await asyncio.shield(removing)
            except asyncio.CancelledError:  # what Ctrl-C did to kubectl was seen before Ctrl-C
                await removing
                raise
    found.sort(key=lambda row: row.node)
    print(_shown(found, args))


def to_try(
    cluster: Cluster, args: argparse.Namespace, read: AgentReports
) -> Iterator[Target | Finding]:
    """Yields the Nodes to try, and a row for each that cannot be tried.

    Raises:
        CommandError: a Node that was named does not exist, or none has NPUs.
    """
    nodes = {node.name: node for node in cluster.nodes}
    running = agents(cluster)
    npus = {row.node: row for row in rows.node_rows(cluster, WORDS, read)}
    if missing := [name for name in args.node if name not in nodes]:
        raise CommandError(f"there is no Node {one_line(missing[0])}", WRONG)
    if args.all and not npus:
        raise CommandError("no Node has NPUs, or an agent")
    held = rows.holdings(cluster, WORDS, read)
    run = secrets.token_hex(3)
    for number, name in enumerate(dict.fromkeys(args.node or npus)):
        pods = only(name, running.get(name, []))
        resource = rows.free_resource(cluster, nodes[name], WORDS, read.found.get(name))
        users = sorted({f"{row.namespace}/{row.pod}" for row in held if row.node == name})
        if not pods:
            yield Finding(name, None, "failed", "no agent runs there", f"kubectl npu node {name}")
        elif resource is not None:
            namespace = args.namespace or pods[0].namespace
            yield Target(name, pods[0], resource, namespace, f"{NAME}-{run}-{number}")
        elif users:
            yield Finding(name, None, "skipped", f"no card is free: {listed(users, 3)}")
        else:
            finding = "no card can be given to a Pod"
            yield Finding(name, None, "failed", finding, f"see `kubectl npu node {name}`")


_SEEN = 5.0
"""Seconds within which the API server's admission sees a PriorityClass that was just made; until
then it refuses Pods of the class."""


async def _make(api: Api, objects: Iterable[Plain], made: list[Request[Any]]) -> None:
    """Makes objects; adds to `made` how each is removed, before that: an answer may be lost."""
    class_made_at = -math.inf
    for body in objects:
        meta = body["metadata"]
        create = Request(
            "create", body["kind"], object, namespace=meta.get("namespace", ""), body=body
        )
        made.append(replace(create, verb="delete", name=meta["name"], body=None))
        pause = Backoff(first=0.2, longest=1.0, least=0.1)
        while True:
            try:
                await api.ask(create)
            except ApiError as error:
                by_admission = error.kind is ErrorKind.FORBIDDEN and error.remedy == NOT_RBAC
                if by_admission and time.monotonic() < class_made_at + _SEEN:
                    await asyncio.sleep(pause.next())
                    continue
                if error.kind in (ErrorKind.CONFLICT, ErrorKind.FORBIDDEN):
                    made.pop()
                    if body is PRIORITY:  # it is there; or else the refusal of the Pods says so
                        break
                raise
            if body is PRIORITY:
                class_made_at = time.monotonic()
            break


def objects(targets: Sequence[Target], args: argparse.Namespace) -> Iterator[Plain]:
    """Yields what is to be made for one Node or more, in this order."""
    yield PRIORITY
    template = targets[0].name
    for namespace in sorted({target.namespace for target in targets if not target.resource}):
        yield _template(template, namespace)
    for target in targets:
        yield target.manifest(args, template)


def _template(name: str, namespace: str) -> dict[str, Any]:
    exactly = {"deviceClassName": DRA.driver}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace, "labels": LABELS},
        "spec": {"spec": {"devices": {"requests": [{"name": "npu", "exactly": exactly}]}}},
    }


async def _judged(api: Api, targets: Sequence[Target], timeout: float) -> AsyncIterator[Finding]:
    """Yields the rows of each Node when its Pod has ended, or has not in `timeout` seconds."""
    waiting = list(targets)
    until = time.monotonic() + timeout
    query = {"labelSelector": f"app.kubernetes.io/name={NAME}"}
    request = Request("list", "Pod", VerifyPodList, query=query, largest=_LARGEST)
    while waiting:
        await asyncio.sleep(_EVERY)
        late = time.monotonic() > until
        pods = {(pod.namespace, pod.name): pod for pod in (await api.ask(request)).items or ()}
        for target in [*waiting]:
            pod = pods.get((target.namespace, target.name))
            if late or pod is None or pod.status.phase in ("Succeeded", "Failed"):
                waiting.remove(target)
                ended = pod and "exitCode" in pod.status.last
                lines = await _lines(api, target) if ended else ()
                for finding in judged(target.node, pod, lines):
                    yield finding


async def _lines(api: Api, target: Target) -> Sequence[Check]:
    """The lines of its log; none if they cannot be read as such."""
    log = Request("get", "Pod", tuple[Check, ...], namespace=target.namespace, name=target.name)
    try:
        return await api.ask(replace(log, subresource="log"))
    except ApiError as error:
        if error.kind is not ErrorKind.GARBAGE:
            raise
        return ()


def judged(node: str, pod: VerifyPod | None, lines: Collection[Check]) -> Iterator[Finding]:
    """Yields what a Pod has found; None: it is gone."""
    conditions = pod.status.conditions if pod else ()
    if pod is None or condition(conditions, "DisruptionTarget"):
        yield Finding(node, None, "skipped", "a Pod with a higher priority got the card")
        return
    card = next((line.section for line in lines if line.section), None)
    if pod.status.phase == "Succeeded":
        yield Finding(node, card, "passed", "a job can run")
        return
    wrong = [line for line in lines if line.state is State.WRONG]
    for line in wrong:
        yield Finding(
            node, line.section or card, "failed", f"{line.name}: {line.detail}", line.remedy
        )
    if wrong:
        return
    scheduled = condition(conditions, "PodScheduled")
    if scheduled and scheduled.status == "False":
        yield Finding(node, None, "skipped", f"it found no place: {scheduled.message}")
        return
    last = pod.status.last
    said = pod.status.message or last.get("message", "").strip() or last.get("reason")
    yield Finding(node, card, "failed", said or "its Pod did not end in time")


async def _remove(api: Api, args: argparse.Namespace, made: Sequence[Request[Any]]) -> None:
    try:
        await _delete(api, made)
    except ApiError:
        # Ctrl-C ends all that runs in the terminal, kubectl as well.
        async with through_kubectl(flags(args), asks=False) as (another, _):
            await _delete(another, made)


async def _delete(api: Api, made: Sequence[Request[Any]]) -> None:
    for request in reversed(made):
        try:
            await api.ask(request)
        except ApiError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise


def _shown(found: Sequence[Finding], args: argparse.Namespace) -> str:
    if view.is_data(args):
        return view.data([asdict(row) for row in found], args)
    cells = [[one_line(getattr(row, name) or "-") for name in _COLUMNS] for row in found]
    remedies = [f"{row.node}: {one_line(row.remedy)}" for row in found if row.remedy]
    return "\n".join([table(_COLUMNS, cells, args), *([""] if remedies else []), *remedies])
