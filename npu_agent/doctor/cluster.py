"""The cluster: the API server, the agent's rights, and what its Node says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.config.resources import resources_of
from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import Resource
from npu_agent.core.vocabulary import label_sets
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.host import offered
from npu_agent.doctor.kubelet import Kubelet, expected
from npu_agent.doctor.look import DEADLINE, look
from npu_agent.doctor.places import Places
from npu_agent.doctor.situation import Situation
from npu_agent.kube import FIELD_MANAGER, Api, ApiError, Kind, access
from npu_agent.kube.node import NodeMeta, node_meta, read_whole
from npu_agent.outputs.events import NAMESPACE
from npu_agent.outputs.labels import compute, nfd
from npu_agent.outputs.labels.compute import Machine
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.vendors import VOCABULARIES, WORDS

_RULES = {
    ("get", "nodes"): "labels and Events are about its own Node",
    ("patch", "nodes"): "labels are applied to it",
    ("create", "events"): "Events tell of its cards",
    ("patch", "events"): "one that happens again is counted up",
}


@dataclass(frozen=True, slots=True)
class Right:
    """Something that the agent has to be allowed."""

    verb: str
    resource: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All that was seen of it."""

    wanted: tuple[Right, ...]
    """What the configuration needs; empty: nothing is asked of the API server."""
    known_as: str = ""
    trouble: ApiError | None = None
    """Why it could not be talked to."""
    expects_credentials: bool = True
    """Whether there should be some here: in a Pod, or where somebody pointed to a kubeconfig."""
    allowed: Mapping[Right, bool] | None = None
    node: Mapping[str, Any] | ApiError | None = None
    """As the API server has it; None: not asked for."""
    machine: Machine | None = None
    """What the firmware calls this host; None where it does not say in time."""


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
    return tuple(Right(*right) for right, needs in needed.items() if needs)


async def cluster(situation: Situation) -> Cluster:
    """Asks for the rights first, which needs none; then for the Node."""
    rights = wanted(situation)
    read = await look(lambda: read_machine(situation.host_root))
    machine = read if isinstance(read, Machine) else None
    if not rights:
        return Cluster(wanted=rights, machine=machine)
    expects = await look(lambda: _credentials_expected(situation))
    api = Api(deadline=DEADLINE)
    try:
        return await _asked(api, situation, rights, machine)
    except ApiError as error:
        credentials = expects is not False
        return Cluster(
            wanted=rights, trouble=error, expects_credentials=credentials, machine=machine
        )
    finally:
        await api.close()


async def _asked(
    api: Api, situation: Situation, rights: tuple[Right, ...], machine: Machine | None
) -> Cluster:
    allowed: dict[Right, bool] | None
    try:
        allowed = {right: await _may(api, right, situation) for right in rights}
    except ApiError as error:
        if error.kind is not Kind.FORBIDDEN:
            raise
        allowed = None  # a cluster without system:basic-user; the rest may be asked
    known_as = api.known_as
    node: dict[str, Any] | ApiError | None = None
    if situation.node_name:
        try:
            node = await read_whole(api, situation.node_name)
        except ApiError as error:
            node = error
    return Cluster(wanted=rights, known_as=known_as, allowed=allowed, node=node, machine=machine)


async def _may(api: Api, right: Right, situation: Situation) -> bool:
    if right.resource == "events":
        return await access.allowed(api, right.verb, right.resource, namespace=NAMESPACE)
    return await access.allowed(api, right.verb, right.resource, name=situation.node_name or "")


def unseen(situation: Situation, why: Unseen) -> Cluster:
    """Nothing of it was seen."""
    trouble = ApiError(f"not asked: {why.why}", kind=Kind.UNREACHABLE)
    return Cluster(wanted=wanted(situation), trouble=trouble)


def _credentials_expected(situation: Situation) -> bool:
    default = os.path.expanduser("~/.kube/config")  # noqa: PTH111 (see npu_agent/kube/client.py)
    return situation.in_pod or "KUBECONFIG" in os.environ or os.path.exists(default)  # noqa: PTH110


def checks(
    situation: Situation,
    found: Cluster,
    kubelet: Kubelet,
    snapshot: Snapshot | Unseen,
    places: Places,
) -> Iterator[Check]:
    """What it means."""
    if not found.wanted:
        unused = "labels.output and events ask nothing of it"
        for name in ("NODE_NAME", "API server", "Node"):
            yield Check(name, State.UNUSED, unused)
    else:
        yield _of_name(situation)
        yield _of_server(found)
        for right in found.wanted:
            yield _of_right(found, right)
        yield _of_node(situation, found)
        for resource in resources_of(situation.config, WORDS.core_counts):
            yield _of_allocatable(situation, found, kubelet, snapshot, resource)
    yield _of_labels(situation, found, snapshot, places)


def _of_name(situation: Situation) -> Check:
    name = "NODE_NAME"
    if situation.node_name:
        return Check(name, State.OK, situation.node_name)
    if situation.in_pod:
        return Check(
            name,
            State.WRONG,
            "not set: no Node can be labelled, and Events are about none",
            "set it from spec.nodeName by the downward API, as k8s/daemonset.yaml does",
        )
    return Check(
        name,
        State.UNKNOWN,
        "not set here, so that this host's Node cannot be looked at",
        "NODE_NAME=(as `kubectl get nodes` has it) npu-agent doctor",
    )


def _of_server(found: Cluster) -> Check:
    name, error = "API server", found.trouble
    if error is None:
        return Check(name, State.OK, found.known_as)
    if error.kind is Kind.CREDENTIALS and not found.expects_credentials:
        return Check(
            name,
            State.UNKNOWN,
            "no credentials here",
            "ask in the agent's Pod, or set KUBECONFIG",
        )
    detail, remedy = _split(error)
    return Check(name, State.WRONG, detail, remedy)


def _split(error: ApiError) -> tuple[str, str]:
    """An error's line as what happened and what to do, which it has last, in some words."""
    parts = re.fullmatch("(.*): (.{25,})", str(error), re.DOTALL)
    return (parts[1], parts[2]) if parts else (str(error), "")


def _of_right(found: Cluster, right: Right) -> Check:
    name = f"right to {right}"
    if found.allowed is None:
        why = "could not be asked" if found.trouble else "does not say"
        return Check(name, State.UNKNOWN, f"the API server {why}")
    if found.allowed[right]:
        return Check(name, State.OK, "allowed")
    rule = f'{{apiGroups: [""], resources: [{right.resource}], verbs: [{right.verb}]}}'
    return Check(
        name,
        State.WRONG,
        f"missing: {_RULES[right.verb, right.resource]}",
        f"kubectl apply -k k8s/, or add this rule to the ClusterRole npu-agent: {rule}; and its "
        "ClusterRoleBinding has to name this ServiceAccount",
    )


def _of_node(situation: Situation, found: Cluster) -> Check:
    name = "Node"
    if isinstance(found.node, ApiError):
        detail, remedy = _split(found.node)
        unseen = found.node.kind is Kind.FORBIDDEN  # which has a line of its own
        return Check(name, State.UNKNOWN if unseen else State.WRONG, detail, remedy)
    if found.node is None:
        return _node_unseen(situation, found, name)
    status, spec = _part(found.node, "status"), _part(found.node, "spec")
    version = _part(status, "nodeInfo").get("kubeletVersion", "of unknown version")
    conditions = status.get("conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        ready = isinstance(condition, Mapping) and condition.get("type") == "Ready"
        if ready and condition.get("status") != "True":
            return Check(
                name,
                State.NOTE,
                f"{situation.node_name} is not Ready: {condition.get('message') or 'no word'}",
                "journalctl -u kubelet",
            )
    if spec.get("unschedulable"):
        return Check(
            name,
            State.NOTE,
            f"{situation.node_name} is cordoned: no new Pod is scheduled to it",
            f"kubectl uncordon {situation.node_name}",
        )
    return Check(name, State.OK, f"{situation.node_name}, kubelet {version}")


def _node_unseen(situation: Situation, found: Cluster, name: str) -> Check:
    why = "the API server could not be asked"
    if not situation.node_name:
        why = "NODE_NAME is not set"
    elif isinstance(found.node, ApiError):
        why = "the Node could not be read: see there"
    return Check(name, State.UNKNOWN, why)


def _part(thing: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = thing.get(key)
    return found if isinstance(found, Mapping) else {}


def _of_allocatable(
    situation: Situation,
    found: Cluster,
    kubelet: Kubelet,
    snapshot: Snapshot | Unseen,
    resource: Resource,
) -> Check:
    """Whether the Node has as many devices to give as are healthy here."""
    name = f"allocatable {resource.name}"
    if isinstance(snapshot, Unseen):
        return snapshot.check(name)
    if not isinstance(found.node, Mapping):
        return _node_unseen(situation, found, name)
    devices = offered(situation, resource, snapshot)
    healthy = len(expected(resource.name, devices, kubelet.held))
    said = str(_part(_part(found.node, "status"), "allocatable").get(resource.name, "0"))
    if said == str(healthy):
        return Check(name, State.OK, f"{said}, as many as are healthy here")
    if any(odd.unread for odd in snapshot.odd):
        return Check(
            name,
            State.UNKNOWN,
            f"{said} on the Node, {healthy} healthy here, where not all could be read",
            "mend the odd entry first",
        )
    causes = (
        "the kubelet tells the Node every ten seconds: ask again; else the agent is not "
        "registered, follows another configuration, or a second plugin owns the resource"
        if kubelet.agent_runs or isinstance(kubelet.owner, Unseen)
        else "no npu-agent serves this node: is its Pod running here?"
    )
    return Check(name, State.WRONG, f"{said} on the Node, {healthy} healthy device(s) here", causes)


def _of_labels(
    situation: Situation, found: Cluster, snapshot: Snapshot | Unseen, places: Places
) -> Check:
    """Whether the labels are as they should be, and whose they are."""
    name, output = "labels", situation.config.labels.output
    if output == "none":
        return Check(name, State.UNUSED, "labels.output is none")
    if isinstance(snapshot, Unseen):
        return snapshot.check(name)
    if doubt := compute.unsure(snapshot):
        return Check(name, State.UNKNOWN, doubt)
    machine = found.machine or Machine(vendor=None, name=None)
    sets = label_sets(VOCABULARIES, situation.config.labels.sets)
    right = compute.labels(snapshot, machine, sets)
    if output == "nfd":
        if isinstance(places.features, Unseen):
            return places.features.check(name)
        there = nfd.parse(places.features)
        wrong = _differences(right, there, frozenset(there))
        return _labels(name, right, wrong, f"in {situation.host_root / nfd.FILE}")
    if not isinstance(found.node, Mapping):
        return _node_unseen(situation, found, name)
    try:
        node = node_meta(found.node)
    except ValueError as error:
        return Check(name, State.UNKNOWN, f"the Node as answered: {error}")
    wrong = _differences(right, node.labels, node.applied)
    if not wrong and (theirs := sorted(right.keys() - node.applied)):
        return _of_foreign(name, node, theirs[0], _part(found.node, "metadata"))
    return _labels(name, right, wrong, "on the Node")


def _differences(
    right: Mapping[str, str], there: Mapping[str, str], ours: frozenset[str]
) -> list[str]:
    """What is not as it should be, one phrase for each key."""
    wrong = [
        f"{key} is {there.get(key, 'missing')} and should be {value}"
        for key, value in right.items()
        if there.get(key) != value
    ]
    return wrong + [f"{key} should be gone" for key in sorted(ours - right.keys())]


def _labels(name: str, right: Mapping[str, str], wrong: list[str], where: str) -> Check:
    if not wrong:
        return Check(name, State.OK, f"{len(right)} {where}, as they should be")
    more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    return Check(
        name,
        State.WRONG,
        f"{where}: {wrong[0]}{more}",
        "the agent puts them right within labels.resync; if not, readiness and its log say why. "
        "`npu-agent labels apply` does it now",
    )


def _of_foreign(name: str, node: NodeMeta, key: str, metadata: Mapping[str, Any]) -> Check:
    """Labels with the right values in somebody else's hands."""
    managers = sorted(
        str(entry.get("manager"))
        for entry in metadata.get("managedFields") or ()
        if isinstance(entry, Mapping)
        and entry.get("manager") != FIELD_MANAGER
        and f"f:{key}" in _part(_part(_part(entry, "fieldsV1"), "f:metadata"), "f:labels")
    )
    return Check(
        name,
        State.NOTE,
        f"{key} of Node {node.name} is right, and set by "
        f"{', '.join(managers) or 'somebody unknown'}",
        "two label the same Node: delete the vendor's feature discovery; the agent takes over at "
        "its next look (labels.resync)",
    )
