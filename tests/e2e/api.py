"""Requests to the API server with the agent's own token, and the components that restrict it."""

from __future__ import annotations

from typing import Any

import yaml

from tests.cluster import Answer
from tests.e2e.manifests import thing
from tests.e2e.node import NAMESPACE, Node

ACCOUNT = "npu-agent"
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
ADMIN = "admin-token"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Asked = tuple[str, str, Any, str]
"""Method, path, body and content type of a request."""


def configured(config: dict[str, Any] | str, image: str, tag: str) -> dict[str, Any]:
    """What an overlay says of the agent's config and image."""
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    patch = thing("ConfigMap", "npu-device-plugin", namespace="", data={"config.yaml": text})
    named = {"name": "npu-agent", "newName": image, "newTag": tag}
    return {"images": [named], "patches": [{"patch": yaml.safe_dump(patch)}]}


def is_policy(thing: dict[str, Any]) -> bool:
    return str(thing["kind"]).startswith("ValidatingAdmissionPolicy")


def delete_dra(node: Node, rendered: list[dict[str, Any]]) -> None:
    """Deletes what an overlay with the component dra has beyond k8s/ itself, and its policies."""
    for made in rendered:
        if is_policy(made) or made["kind"] == "DeviceClass" or "dra" in made["metadata"]["name"]:
            node.kubectl("delete", made["kind"], made["metadata"]["name"])


def ask(
    node: Node,
    token: str,
    method: str,
    path: str,
    body: Any = None,
    kind: str = "application/json",
    *,
    real: bool = False,
    user: str = "",
) -> Answer:
    """Asks the API server, as `user` if given; unless `real`, it only says what it would do."""
    if not real and method != "GET":
        path += ("&" if "?" in path else "?") + "dryRun=All"
    headers = {"Content-Type": kind} | ({"Impersonate-User": user} if user else {})
    return node.cluster.request(method, path, body, token=token, headers=headers)


def refusal(answer: Answer) -> str:
    """The message of a request that was refused as forbidden."""
    assert answer.status == 403, answer
    return str(answer.body["message"])


def rights(node: Node, whose: str) -> set[tuple[str, ...]]:
    """What RBAC lets the owner of this token do in the agent's namespace, a line for each rule."""
    spec = {"namespace": NAMESPACE}
    review = thing("SelfSubjectRulesReview", "", "authorization.k8s.io/v1", spec=spec)
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    status = ask(node, whose, "POST", path, review, real=True).body["status"]
    assert not status["incomplete"], status
    return {
        (*rule[group], "|", *rule.get(what, ()), "|", *rule["verbs"])
        for rules, group, what in (
            ("resourceRules", "apiGroups", "resources"),
            ("nonResourceRules", "nonResourceURLs", ""),
        )
        for rule in status[rules]
    }
