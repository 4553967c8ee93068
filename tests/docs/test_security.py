"""docs/security.md has the rights that the manifests give, verb by verb."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from .pages import ROOT, page

PAGE = page("docs/security.md")
AS_NODE = "impersonate-on:associated-node:"
_ROW = re.compile(
    r"^\| (?:`([a-z-]+)`[^|]* \| )?([a-z/]+) \| ([a-z]+(?:, [a-z]+)*) \| ", re.MULTILINE
)


def documented() -> dict[tuple[str, str], set[str]]:
    """The verbs of each row of both tables, by component ("" is k8s/rbac.yaml) and resource."""
    section = PAGE.text.partition("## In the API\n")[2].partition("\n## ")[0]
    return {
        (component, resource): set(verbs.split(", "))
        for component, resource, verbs in _ROW.findall(section)
        if "resource" not in (resource, verbs)  # not the headings
    }


def rules(documents: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for document in documents:
        if document["kind"] == "ClusterRole":
            yield from document["rules"]
        for patch in document.get("patches", ()):
            for change in yaml.safe_load(patch["patch"]):
                # The component `impersonation` puts other words in place of get, list and watch.
                if change["op"] == "add" and "rules" in change["path"]:
                    yield change["value"]


def test_the_tables_of_rights_are_those_of_the_manifests() -> None:
    given = {}
    for component, file in {
        "": "k8s/rbac.yaml",
        "dra": "k8s/components/dra/rbac.yaml",
        "node-condition": "k8s/components/node-condition/kustomization.yaml",
        "eviction": "k8s/components/eviction/kustomization.yaml",
    }.items():
        for rule in rules(yaml.safe_load_all((ROOT / file).read_text(encoding="utf-8"))):
            for resource in rule["resources"]:
                given[component, resource] = {verb.removeprefix(AS_NODE) for verb in rule["verbs"]}
    assert documented() == given


def test_impersonation_takes_away_reads_only() -> None:
    """Its row says "instead of get, list, watch": with its words it has the same verbs."""
    (file,) = yaml.safe_load_all(
        (ROOT / "k8s/components/impersonation/kustomization.yaml").read_text(encoding="utf-8")
    )
    rights = {("npu-agent", 0): ("", "nodes"), ("npu-agent-dra", 0): ("dra", "resourceclaims")}
    rights["npu-agent-dra", 1] = ("dra", "resourceslices")
    for patch in file["patches"]:
        for change in yaml.safe_load(patch["patch"]):
            if change["op"] != "replace":
                continue
            number = int(re.fullmatch(r"/rules/(\d)/verbs", change["path"])[1])  # type: ignore[index]
            verbs = {verb.removeprefix(AS_NODE) for verb in change["value"]}
            plain = verbs & set(change["value"])
            assert verbs == documented()[rights[patch["target"]["name"], number]]
            assert not plain & {"get", "list", "watch"}
