"""The programs that read k8s/: kustomize (in kubectl), Helm, kube-score, OPA."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.build import (
    HELM,
    HELM_3,
    KUBE_SCORE,
    KUBERNETES,
    OPA,
    OPA_OLDEST,
    GoBuild,
    ensure_binaries,
)

K8S = Path(__file__).parents[2] / "k8s"
CHART = K8S / "chart"
COMPONENTS = sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml"))

STAND_ALONE = [
    name
    for name in COMPONENTS
    if yaml.safe_load(
        (K8S / "components" / name / "kustomization.yaml").read_text(encoding="utf-8")
    )["kind"]
    == "Kustomization"
]
"""Components that are applied by themselves; the others are parts of an overlay."""
PARTS = [name for name in COMPONENTS if name not in STAND_ALONE]
PARTS_BUT_NODES = [name for name in PARTS if not name.startswith("nodes-")]

Object = dict[str, Any]

_BUILDS = {
    "helm": HELM,
    "helm-3": HELM_3,
    "kube-score": KUBE_SCORE,
    "opa": OPA,
    "opa-0": OPA_OLDEST,
}


@functools.cache
def program(name: str) -> Path:
    """A program by its name, built if it is not in the cache yet."""
    build: GoBuild = _BUILDS.get(name, KUBERNETES)
    return ensure_binaries(build)[re.sub(r"-\d$", "", name)]


def run(name: str, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a program, whatever comes of it. None of them gets to see a cluster of this machine."""
    return subprocess.run(
        [program(name), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )


def output(name: str, *arguments: str | Path, stdin: str = "") -> str:
    """What a program prints."""
    done = run(name, *arguments, stdin=stdin)
    if done.returncode != 0:
        raise RuntimeError(f"{name} {arguments[0]}: {done.stderr}{done.stdout}")
    return done.stdout


def kustomize(directory: Path) -> str:
    """What kustomize makes of a directory."""
    return output("kubectl", "kustomize", directory)


def overlay(
    directory: Path, components: Iterable[str] = (), resource: str = ".", **fields: object
) -> list[Object]:
    """What kustomize makes of an overlay in this directory.

    Args:
        directory: gets the kustomization.
        components: of k8s/components.
        resource: a directory of k8s/.
        fields: more of the kustomization.
    """

    def path(to: str) -> str:
        return os.path.relpath(K8S / to, directory.resolve())

    parts = [path(f"components/{component}") for component in components]
    text = {"resources": [path(resource)], "components": parts, **fields}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    return objects(kustomize(directory))


def objects(text: str) -> list[Object]:
    """The objects of a YAML text."""
    return [thing for thing in yaml.load_all(text, Loader=yaml.CSafeLoader) if thing]


def by_kind(things: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = (thing for thing in things if thing["kind"] == kind)
    return found


def pod_of(things: list[Object]) -> Object:
    """The Pod of the agent's DaemonSet."""
    spec: Object = by_kind(things, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def config_of(things: list[Object]) -> Object:
    """The agent's config file."""
    found: Object = yaml.safe_load(by_kind(things, "ConfigMap")["data"]["config.yaml"])
    return found
