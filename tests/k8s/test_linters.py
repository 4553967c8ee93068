"""Linters find nothing in k8s/ that is not explained in accepted.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .conftest import Overlay
from .tools import K8S, PARTS_BUT_NODES, STAND_ALONE, kustomize, objects, run

ACCEPTED = {
    entry["finding"]: entry.get("objects")
    for entry in yaml.safe_load(
        (Path(__file__).parent / "accepted.yaml").read_text(encoding="utf-8")
    )
}
"""Findings by what is found, with the names of the objects; None: wherever it is found."""


def findings(text: str, version: str) -> Iterator[tuple[str, str]]:
    """What kube-score finds, as name of the object and finding."""
    optional = ("container-seccomp-profile", "container-ports-check")
    words = [f"--enable-optional-test={name}" for name in optional]
    done = run(
        "kube-score",
        *["score", f"--kubernetes-version=v{version}", "--output-format=json", *words, "-"],
        stdin=text,
    )
    assert done.stdout, done.stderr
    for thing in json.loads(done.stdout) or ():
        for check in thing["checks"]:
            assert check["skipped"] or check["grade"] >= 10 or check["comments"], check
            if not check["skipped"] and check["grade"] < 10:
                for comment in check["comments"]:
                    yield thing["object_meta"]["name"], comment["summary"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kube_score_finds_nothing_unexplained(version: str, overlay: Overlay) -> None:
    everything = [yaml.safe_dump_all(overlay(PARTS_BUT_NODES))]
    everything += [kustomize(K8S / "components" / name) for name in STAND_ALONE]
    found = {finding for text in everything for finding in findings(text, version) if objects(text)}
    unexplained = {
        (name, what)
        for name, what in found
        if what not in ACCEPTED or (ACCEPTED[what] is not None and name not in ACCEPTED[what])
    }
    assert unexplained == set()
    for what, names in ACCEPTED.items():
        seen = {name for name, finding in found if finding == what}
        assert seen, f"found no more: {what}"
        assert names is None or set(names) == seen, what
