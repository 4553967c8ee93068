"""Builders of the objects that tests apply: Pods, Deployments, claims, slices, DeviceClasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Thing = dict[str, Any]

RESOURCE = "beta.furiosa.ai/npu"
DRIVER = "npu.furiosa.ai"
DRA_API = "resource.k8s.io/v1"
WORKLOAD = "localhost/workload:1"
IMAGE = "localhost/npu-agent:test"
ONE = "one-npu"
"""A template for one card of any kind."""
SLEEP = "exec sleep 100000"


def thing(
    kind: str, name: str, api: str = "v1", *, namespace: str = "default", **fields: Any
) -> Thing:
    """An object; with an empty `namespace` one that is in none."""
    meta = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api, "kind": kind, "metadata": meta, **fields}


def container(
    name: str = "main",
    limits: Mapping[str, object] | None = None,
    *,
    claims: Iterable[Mapping[str, str]] = (),
    image: str = WORKLOAD,
    command: str = SLEEP,
    **fields: Any,
) -> Thing:
    """A container of an image that the node has; `command` is for a shell."""
    resources: Thing = {"claims": list(claims)} if claims else {}
    if limits:
        resources["limits"] = {key: str(value) for key, value in limits.items()}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "resources": resources,
        **fields,
    }


def pod(name: str, *containers: Thing, namespace: str = "default", **spec: Any) -> Thing:
    """A Pod that is never restarted, and has no time to end in."""
    never = {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never"}
    return thing(
        "Pod", name, namespace=namespace, spec={**never, "containers": list(containers), **spec}
    )


def npu_pod(name: str, npus: int = 1, resource: str = RESOURCE, **spec: Any) -> Thing:
    """A Pod that asks for so many of a resource and sleeps."""
    return pod(name, container(limits={resource: npus}), **spec)


def deployment(name: str, *containers: Thing, replicas: int = 1, **spec: Any) -> Thing:
    """A Deployment, whose Pods have the label ``app`` with its name."""
    labels = {"app": name}
    template = {"terminationGracePeriodSeconds": 0, "containers": list(containers), **spec}
    return thing(
        "Deployment",
        name,
        "apps/v1",
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    )


def request(name: str = "npu", *, arch: str = "", count: int = 1, **fields: Any) -> Thing:
    """A request for cards, of one kind if there is an `arch`."""
    return {"name": name, "exactly": {**wanted(arch), "count": count, **fields}}


def wanted(arch: str = "") -> Thing:
    """Which cards a request takes."""
    return {"deviceClassName": DRIVER} | (selected(f'arch == "{arch}"') if arch else {})


def selected(attribute: str) -> Thing:
    """The selectors for devices of which an expression on an attribute of ours is true."""
    expression = f'device.attributes["{DRIVER}"].{attribute}'
    return {"selectors": [{"cel": {"expression": expression}}]}


def claim(name: str, *requests: Thing, **devices: Any) -> Thing:
    """A ResourceClaim; by default for one card of any kind."""
    spec = {"devices": {"requests": requests or [request()], **devices}}
    return thing("ResourceClaim", name, DRA_API, spec=spec)


def template(name: str, *requests: Thing, **devices: Any) -> Thing:
    """A ResourceClaimTemplate; by default for one card of any kind."""
    spec = {"spec": claim(name, *requests, **devices)["spec"]}
    return thing("ResourceClaimTemplate", name, DRA_API, spec=spec)


NPUS = ({"name": "npus"},)
"""A container's claims, if it has the whole claim of `claim_pod`."""


def claim_pod(
    name: str,
    *,
    of_template: str = ONE,
    of_claim: str = "",
    containers: Mapping[str, Iterable[Mapping[str, str]]] | None = None,
    image: str = IMAGE,
    command: str = SLEEP,
    **spec: Any,
) -> Thing:
    """A Pod with the claim `npus`, by default in one container.

    The agent's image has npu-agent, which judges what a container was given.

    Args:
        name: of the Pod.
        of_template: the claim's template.
        of_claim: the claim, instead of one of a template.
        containers: for each container its `resources.claims`.
        image: of all containers.
        command: of all containers.
        spec: more of the Pod's spec.
    """
    named = {"resourceClaimName": of_claim} if of_claim else {}
    source = named or {"resourceClaimTemplateName": of_template}
    made = [
        container(one, claims=claims, image=image, command=command)
        for one, claims in (containers or {"main": NPUS}).items()
    ]
    return pod(name, *made, resourceClaims=[{"name": "npus", **source}], **spec)


def small(name: str, **fields: Any) -> Thing:
    """A Pod as `claim_pod`, of an image that starts as fast as one can."""
    return claim_pod(name, image=WORKLOAD, **fields)


def custom_resource(kind: str, group: str) -> Thing:
    """A CustomResourceDefinition of version v1, whose objects have any fields."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": kind, "plural": plural}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    api = "apiextensions.k8s.io/v1"
    return thing("CustomResourceDefinition", f"{plural}.{group}", api, namespace="", spec=spec)


def device_class(name: str, expression: str, resource: str = "") -> Thing:
    """A DeviceClass, with an extended resource name if there is one."""
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    named = {"extendedResourceName": resource} if resource else {}
    return thing("DeviceClass", name, DRA_API, namespace="", spec={**spec, **named})


def resource_slice(
    name: str,
    node: str | None,
    devices: list[Thing],
    *,
    driver: str = DRIVER,
    pool: str | None = None,
) -> Thing:
    """A ResourceSlice that is the whole pool of its node; without a `node` it is for all nodes."""
    whole = {"name": pool or node or "all", "generation": 1, "resourceSliceCount": 1}
    where = {"nodeName": node} if node else {"allNodes": True}
    spec = {"driver": driver, **where, "pool": whole, "devices": devices}
    return thing("ResourceSlice", name, DRA_API, namespace="", spec=spec)
