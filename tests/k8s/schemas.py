"""Objects against the schemas of Kubernetes, offline: the two ends of what npu-agent supports."""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]

VERSIONS = ("1.30", "1.37")
CUSTOM = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "SecurityContextConstraints"}
"""Kinds of Prometheus Operator, which tests/monitoring reads, and of OpenShift: Kubernetes has no
schema of them."""
NEWER = {
    "DeviceClass": "1.34",
    "MutatingAdmissionPolicy": "1.36",
    "MutatingAdmissionPolicyBinding": "1.36",
}
"""Kinds by the version that served them first in the apiVersion that we use."""


def check(thing: dict[str, Any], version: str) -> None:
    """Checks an object, unless `version` cannot know it."""
    kind = thing["kind"]
    if kind in CUSTOM or float(NEWER.get(kind, "0")) > float(version):
        return
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        raise AssertionError(
            f"{kind} {thing['metadata']['name']}, {where}, Kubernetes {version}: {error.message}"
        ) from None
