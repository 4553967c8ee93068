"""The cluster: the API server, the agent's rights, and its Node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import Resource
from npu_agent.doctor.check import (
    Check,
    Finding,
    Unseen,
    have,
    line,
    note,
    ok,
    unknown,
    unused,
    wrong,
)
from npu_agent.doctor.host import offered
from npu_agent.doctor.kubelet import Kubelet, expected
from npu_agent.doctor.places import Places
from npu_agent.doctor.probe import DEADLINE, probe
from npu_agent.doctor.situation import Situation
from npu_agent.kube import FIELD_MANAGER, Api, ApiError, Kind, access
from npu_agent.kube.node import NodeMeta, node_meta, read_whole
from npu_agent.outputs.events import NAMESPACE
from npu_agent.outputs.labels import compute, nfd
from npu_agent.outputs.labels.compute import Machine
from npu_agent.outputs.labels.machine import read_machine

_RULES = {
    ("get", "nodes"): "labels and Events are about its own Node",
    ("patch", "nodes"): "labels are applied to it",
    ("create", "events"): "Events report what becomes of its cards",
    ("patch", "events"): "one that happens again is counted up",
}

Right = tuple[str, str]
"""A verb and a resource that the agent has to be allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All that was seen of it."""

    server: Finding | Unseen
    """Of the API server and the credentials."""
    allowed: Mapping[Right, bool] | Unseen
    """For each right that the configuration needs; none: nothing is asked of the API server."""
    node: Mapping[str, Any] | ApiError | Unseen
    """As the API server has it."""
    machine: Machine | Unseen
    """What the firmware calls this host."""


def wanted(situation: Situation) -> tuple[Right, ...]:
    """The rights that the agent needs under this configuration."""
    config = situation.config
    labels, events = config.labels.output == "api", config.events
    needed = {
        ("get", "nodes"): labels or events,
        ("patch", "nodes"): labels,
        ("create", "events"): events,
        ("patch", "events"): events,
    }
    return tuple(right for right, needs in needed.items() if needs)


async def cluster(situation: Situation) -> Cluster:
    """Asks for the rights first, which needs none; then for the Node."""
    machine = await probe(lambda: read_machine(situation.host_root))
    unasked = Unseen("the API server could not be asked")
    if not wanted(situation):
        return Cluster(server=unasked, allowed=unasked, node=unasked, machine=machine)
    expected = await probe(lambda: _credentials_expected(situation))
    api = Api(deadline=DEADLINE)
    try:
        allowed = await _allowed(api, situation)
        server = ok(api.known_as)
        node = await _node(api, situation)
    except ApiError as error:
        allowed = node = unasked
        server = _of_failure(error, expected is not False)
    finally:
        await api.close()
    return Cluster(server=server, allowed=allowed, node=node, machine=machine)


async def _allowed(api: Api, situation: Situation) -> Mapping[Right, bool] | Unseen:
    allowed = {}
    for verb, resource in wanted(situation):
        where = {"namespace": NAMESPACE}
        if resource == "nodes":
            where = {"name": situation.node_name or ""}
        try:
            allowed[verb, resource] = await access.allowed(api, verb, resource, **where)
        except ApiError as error:
            if error.kind is not Kind.FORBIDDEN:
                raise
            # A cluster without system:basic-user; the rest may be asked.
            return Unseen("the API server does not say")
    return allowed


async def _node(api: Api, situation: Situation) -> Mapping[str, Any] | ApiError | Unseen:
    if not situation.node_name:
        return Unseen("NODE_NAME is not set")
    try:
        return await read_whole(api, situation.node_name)
    except ApiError as error:
        return error


def _credentials_expected(situation: Situation) -> bool:
    """Whether there should be some: in a Pod, or where somebody named or made a kubeconfig."""
    default = os.path.expanduser("~/.kube/config")  # noqa: PTH111 (see npu_agent/kube/client.py)
    return situation.in_pod or "KUBECONFIG" in os.environ or os.path.exists(default)  # noqa: PTH110


def _of_failure(error: ApiError, credentials_expected: bool) -> Finding:
    if error.kind is Kind.CREDENTIALS and not credentials_expected:
        return unknown("no credentials here", "ask in the agent's Pod, or set KUBECONFIG")
    return wrong(error.what, error.remedy)


def checks(
    situation: Situation,
    found: Cluster,
    kubelet: Kubelet,
    snapshot: Snapshot | Unseen,
    places: Places,
) -> Iterator[Check]:
    """What it means."""
    if not wanted(situation):
        for name in ("NODE_NAME", "API server", "Node"):
            yield line(name, unused, "labels.output and events ask nothing of it")
    else:
        yield line("NODE_NAME", _of_name, situation)
        yield line("API server", have, found.server)
        for right in wanted(situation):
            yield line(f"right to {' '.join(right)}", _of_right, found, right)
        yield line("Node", _of_node, situation, found)
        for one in situation.resources:
            name = f"allocatable {one.name}"
            yield line(name, _of_allocatable, situation, found, kubelet, snapshot, one)
    yield line("labels", _of_labels, situation, found, snapshot, places)


def _of_name(situation: Situation) -> Finding:
    if situation.node_name:
        return ok(situation.node_name)
    if situation.in_pod:
        return wrong(
            "not set: no Node can be labelled, and Events are about none",
            "set it from spec.nodeName by the downward API, as k8s/daemonset.yaml does",
        )
    return unknown(
        "not set here, so that this host's Node cannot be read",
        "NODE_NAME=(as `kubectl get nodes` has it) npu-agent doctor",
    )


def _of_right(found: Cluster, right: Right) -> Finding:
    if have(found.allowed)[right]:
        return ok("allowed")
    verb, resource = right
    rule = f'{{apiGroups: [""], resources: [{resource}], verbs: [{verb}]}}'
    return wrong(
        f"missing: {_RULES[right]}",
        f"kubectl apply -k k8s/, or add this rule to the ClusterRole npu-agent: {rule}; and its "
        "ClusterRoleBinding has to name this ServiceAccount",
    )


def _of_node(situation: Situation, found: Cluster) -> Finding:
    if isinstance(found.node, ApiError):
        # That right has a line of its own.
        judge = unknown if found.node.kind is Kind.FORBIDDEN else wrong
        return judge(found.node.what, found.node.remedy)
    node = have(found.node)
    status = _part(node, "status")
    conditions = status.get("conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        ready = isinstance(condition, Mapping) and condition.get("type") == "Ready"
        if ready and condition.get("status") != "True":
            return note(
                f"{situation.node_name} is not Ready: {condition.get('message') or 'no reason'}",
                "journalctl -u kubelet",
            )
    if _part(node, "spec").get("unschedulable"):
        return note(
            f"{situation.node_name} is cordoned: no new Pod is scheduled to it",
            f"kubectl uncordon {situation.node_name}",
        )
    version = _part(status, "nodeInfo").get("kubeletVersion", "of unknown version")
    return ok(f"{situation.node_name}, kubelet {version}")


def _readable(found: Cluster) -> Mapping[str, Any]:
    if isinstance(found.node, ApiError):
        raise Unseen("the Node could not be read: see that line")
    return have(found.node)


def _part(thing: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = thing.get(key)
    return found if isinstance(found, Mapping) else {}


def _of_allocatable(
    situation: Situation,
    found: Cluster,
    kubelet: Kubelet,
    seen: Snapshot | Unseen,
    resource: Resource,
) -> Finding:
    """Whether the Node has as many devices to give as are healthy here."""
    snapshot, node = have(seen), _readable(found)
    devices = offered(situation, resource, snapshot)
    healthy = len(expected(resource.name, devices, kubelet.held))
    count = str(_part(_part(node, "status"), "allocatable").get(resource.name, "0"))
    if count == str(healthy):
        return ok(f"{count}, as many as are healthy here")
    if any(odd.unread for odd in snapshot.odd):
        return unknown(
            f"{count} on the Node, {healthy} healthy here, where not all could be read",
            "fix the odd entry first",
        )
    remedy = (
        "no npu-agent serves this node: is its Pod running here?"
        if kubelet.owner is None
        else "the kubelet updates the Node every ten seconds: ask again; else the agent is not "
        "registered, follows another configuration, or a second plugin owns the resource"
    )
    return wrong(f"{count} on the Node, {healthy} healthy device(s) here", remedy)


def _of_labels(
    situation: Situation, found: Cluster, seen: Snapshot | Unseen, places: Places
) -> Finding:
    """Whether the labels are as they should be, and whose they are."""
    config = situation.config.labels
    if config.output == "none":
        return unused("labels.output is none")
    snapshot = have(seen)
    if doubt := compute.unsure(snapshot):
        return unknown(doubt)
    machine = Machine(vendor=None, name=None)
    if not isinstance(found.machine, Unseen):
        machine = found.machine
    right = compute.labels(snapshot, machine, situation.vendor.label_sets(config.sets))
    if config.output == "nfd":
        there = nfd.parse(have(places.features))
        return _compared(right, there, frozenset(there), f"in {situation.host_root / nfd.FILE}")
    answer = _readable(found)
    try:
        node = node_meta(answer)
    except ValueError as error:
        return unknown(f"the Node as answered: {error}")
    finding = _compared(right, node.labels, node.applied, "on the Node")
    if not finding.remedy and (theirs := sorted(right.keys() - node.applied)):
        return _of_foreign(node, theirs[0], _part(answer, "metadata"))
    return finding


def _compared(
    right: Mapping[str, str], there: Mapping[str, str], ours: frozenset[str], where: str
) -> Finding:
    differences = [
        f"{key} is {there.get(key, 'missing')} and should be {value}"
        for key, value in right.items()
        if there.get(key) != value
    ]
    differences += [f"{key} should be gone" for key in sorted(ours - right.keys())]
    if not differences:
        return ok(f"{len(right)} {where}, as they should be")
    more = f", and {len(differences) - 1} more differ" if len(differences) > 1 else ""
    return wrong(
        f"{where}: {differences[0]}{more}",
        "the agent corrects them within labels.resync; if not, readiness and its log say why. "
        "`npu-agent labels apply` does it now",
    )


def _of_foreign(node: NodeMeta, key: str, metadata: Mapping[str, Any]) -> Finding:
    """Labels that have the right values, and another owner."""
    managers = sorted(
        str(entry.get("manager"))
        for entry in metadata.get("managedFields") or ()
        if isinstance(entry, Mapping)
        and entry.get("manager") != FIELD_MANAGER
        and f"f:{key}" in _part(_part(_part(entry, "fieldsV1"), "f:metadata"), "f:labels")
    )
    return note(
        f"{key} of Node {node.name} is right, and set by "
        f"{', '.join(managers) or 'an unknown manager'}",
        "two label the same Node: delete the vendor's feature discovery; the agent takes over at "
        "its next check of the labels (labels.resync)",
    )
