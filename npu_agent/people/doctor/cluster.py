"""The cluster: the API server, the agent's rights, and its Node."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from npu_agent.core.state import ApiState
from npu_agent.kube import ApiError, ErrorKind
from npu_agent.kube.node import read, read_whole
from npu_agent.kube.request import AS_NODE, OF_NODES, READS
from npu_agent.kube.reviews import allowed as is_allowed
from npu_agent.outputs.events import NAMESPACE
from npu_agent.people.doctor import dra
from npu_agent.people.doctor.check import (
    Check,
    Context,
    Lines,
    note,
    ok,
    unknown,
    unused,
    wrong,
)

_COMPONENTS = {
    "pods": "eviction (Helm: eviction)",
    "pods/eviction": "eviction (Helm: eviction)",
    "nodes/status": "node-condition (Helm: nodeCondition)",
    "authentication.k8s.io": "metrics-authorization (Helm: metricsAuthorization)",
    "authorization.k8s.io": "metrics-authorization (Helm: metricsAuthorization)",
    "resource.k8s.io": "dra (Helm: dra.enabled)",
}
"""The component that has the rights for an API group, or for a resource."""

_NFD = "feature.node.kubernetes.io/"
"""The labels of Node Feature Discovery; with the component nodes-nfd the agent waits for one."""

Right = tuple[str, str, str]
"""A verb, an API group and a resource."""

_EVICTION_RIGHTS: tuple[Right, ...] = (("get", "", "pods"), ("create", "", "pods/eviction"))
"""Those of the agent as its Node; its account has none of them."""

_DRA_RIGHTS: tuple[Right, ...] = (
    ("get", "resource.k8s.io", "resourceclaims"),
    *(
        (verb, "resource.k8s.io", "resourceslices")
        for verb in ("list", "watch", "create", "patch", "delete")
    ),
)


async def lines(context: Context) -> Lines:
    if not wanted(context):
        yield "API server", unused("nothing asks for it: labels, cordons, events, DRA, tokens")
        return
    yield "NODE_NAME", _node_name(context)
    yield "API server", _server(context)
    await context.probe(access)
    yield "rights", _rights(context)
    if context.node_name:
        yield "Node", _node(context)
    if context.config.health.evict:
        yield "evictions", _evictions(context)


def wanted(context: Context) -> tuple[Right, ...]:
    """The rights that this configuration needs, without those for DRA alone."""
    config = context.config
    labels = config.labels.output == "api"
    # Which of allocation.nodes this node is, may not be known.
    claims = dra.may_use_dra(context) or not (context.node_name or not config.allocation.nodes)
    rights: list[Right] = []
    if labels or config.events or claims:
        rights.append(("get", "", "nodes"))
    if labels or config.cordon:
        rights.append(("watch", "", "nodes"))
    if labels:
        rights.append(("patch", "", "nodes"))
    if config.health.condition.type:
        rights.append(("patch", "", "nodes/status"))
    if config.health.evict:
        rights += _EVICTION_RIGHTS
    if config.events:
        rights += [("create", "", "events"), ("patch", "", "events")]
    if config.metrics.authorization == "kubernetes":
        rights.append(("create", "authentication.k8s.io", "tokenreviews"))
        rights.append(("create", "authorization.k8s.io", "subjectaccessreviews"))
    return tuple(rights)


async def _node_name(context: Context) -> Check:
    if context.node_name:
        return ok(context.node_name)
    if context.in_pod:
        return wrong(
            "not set: there are no labels, no Events about the Node and no DRA",
            "set it from spec.nodeName by the downward API, as k8s/daemonset.yaml does",
            context.apply_again(),
        )
    return unknown(
        "not set here: this host's Node cannot be read",
        "NODE_NAME=(as in `kubectl get nodes`) npu-agent doctor",
    )


class Rights(NamedTuple):
    """The API server's answers about the agent's rights."""

    known_as: str
    """The server, and as whom it was asked."""
    allowed: Mapping[Right, bool] | None
    """None: the API server does not answer that."""
    reads: ApiState | None
    """As whom the agent's account reads; None: not known."""


async def access(context: Context) -> Rights:
    """Asks for the rights, which needs none."""
    rights = wanted(context)
    if dra.may_use_dra(context):
        support = await context.probe_or(dra.dra_support, None)
        rights += _DRA_RIGHTS if support is None or support.available else ()
    allowed: dict[Right, bool] = {}
    async with context.api_server() as api:
        if context.in_pod and context.node_name:
            with contextlib.suppress(ApiError):  # which has lines of its own
                await read(api, context.node_name)
        as_node = api.reads is not None and api.reads.as_node
        for verb, group, resource in rights:
            evicts = (verb, group, resource) in _EVICTION_RIGHTS
            if evicts and not as_node:
                continue  # which has a line of its own
            asked = verb
            if evicts or (as_node and verb in READS and resource in OF_NODES):
                asked = f"{AS_NODE}{verb}"
            name = (context.node_name or "") if resource.startswith("nodes") else ""
            namespace = NAMESPACE if resource == "events" else ""
            try:
                allowed[asked, group, resource] = await is_allowed(
                    api, asked, resource, group=group, namespace=namespace, name=name
                )
            except ApiError as error:
                if error.kind is not ErrorKind.FORBIDDEN:
                    raise
                # A cluster without system:basic-user; the rest may be asked.
                return Rights(api.known_as, None, api.reads)
        return Rights(api.known_as, allowed, api.reads)


async def _server(context: Context) -> Check:
    try:
        server = await context.probe(access)
        if server.reads is None:
            return ok(server.known_as)
        reader = "Node (constrained impersonation)" if server.reads.as_node else "account"
        return ok(f"{server.known_as}; reads as its {reader}")
    except ApiError as error:
        if error.kind is ErrorKind.CREDENTIALS and not context.in_pod:
            return unknown(error.what, "ask in the agent's Pod, or set KUBECONFIG")
        if error.kind is ErrorKind.UNAUTHORIZED and context.in_pod:
            # Without its account there would be no new Pod, so that is restored before.
            return wrong(
                error.what,
                "restore the ServiceAccount if it was deleted, and delete the Pod to get a new "
                f"token{context.overlay_is}",
                f"{context.restore_rights()} && "
                f"kubectl -n {context.namespace} delete pod {context.hostname}",
            )
        return wrong(error.what, error.remedy, "kubectl cluster-info")


async def _rights(context: Context) -> Check:
    """Checks rights; all missing ones are one line, because one command restores them."""
    allowed = (await context.probe(access)).allowed
    if allowed is None:
        return unknown("the API server does not answer that")
    missing = [right for right, granted in allowed.items() if not granted]
    if not missing:
        return ok(f"all {len(allowed)} that this configuration needs")
    verbs: dict[str, list[str]] = {}
    for verb, _, resource in missing:
        verbs.setdefault(resource, []).append(verb)
    detail = "missing: " + ", ".join(f"{verb} ({', '.join(of)})" for verb, of in verbs.items())
    if not context.in_pod:
        return wrong(
            f"{detail}; asked as the user of this kubeconfig",
            "to see the agent's own rights, run this in its Pod; to run npu-agent with this "
            "kubeconfig, give its user the rules of the ClusterRole npu-agent",
            "kubectl describe clusterrole npu-agent",
        )
    remedy = "restore the agent's ServiceAccount, ClusterRole and ClusterRoleBinding; the command "
    remedy += f"changes nothing else{context.overlay_is}"
    of = (group or resource for _, group, resource in missing)
    for component in dict.fromkeys(_COMPONENTS[right] for right in of if right in _COMPONENTS):
        remedy += f". If rights are missing then, add k8s/components/{component}"
    return wrong(detail, remedy, context.restore_rights())


async def _evictions(context: Context) -> Check:
    reads = (await context.probe(access)).reads
    if reads is not None and reads.as_node:
        return ok("of Pods with a card that fails, by the agent as its Node")
    if not context.in_pod:
        return unknown("only the token of a Pod names a Node to act as", "ask in the agent's Pod")
    return note(
        "health.evict reaches only Pods that name a ResourceClaim, by the card's taint: the agent "
        "may not act as its Node",
        "for the others, add k8s/components/impersonation and k8s/components/eviction (Helm: "
        "rbac.mode: impersonation, eviction: true); they take Kubernetes 1.36 or newer, with the "
        "feature gate ConstrainedImpersonation",
    )


async def _node(context: Context) -> Check:
    name = dra.node_name(context)
    try:
        async with context.api_server() as api:
            node = await read_whole(api, name)
    except ApiError as error:
        # That right has a line of its own.
        if error.kind is ErrorKind.FORBIDDEN:
            return unknown(error.what, error.remedy)
        return wrong(error.what, error.remedy, "kubectl get nodes")
    for condition in node.status.conditions:
        if condition.type == "Ready" and condition.status != "True":
            return note(
                f"{name} is not Ready: {condition.message or 'no reason'}",
                "journalctl -u kubelet",
            )
    if node.spec.unschedulable:
        return note(
            f"{name} is cordoned: no new Pod is scheduled to it", f"kubectl uncordon {name}"
        )
    config = context.config
    resources = {config.resource_name, *(resource.name for resource in config.resources)}
    taints = [taint.key for taint in node.spec.taints if taint.key in resources]
    if taints and not any(label.startswith(_NFD) for label in node.metadata.labels):
        return note(
            f"this Node has our taint ({taints[0]}) and no NFD label: NFD's worker may not "
            "tolerate it",
            "where NFD labels the Nodes, let its worker tolerate the taint (worker.tolerations of "
            "NFD's chart)",
        )
    return ok(f"{name}, kubelet {node.status.node_info.kubelet_version or 'of unknown version'}")
