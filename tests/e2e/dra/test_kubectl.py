"""`kubectl npu` on a real cluster whose node offers its cards by DRA."""

from __future__ import annotations

import json

from tests.e2e.dra.claims import running, verified, waits
from tests.e2e.manifests import DRIVER, claim_pod, request, selected, small, template
from tests.e2e.node import Node
from tests.e2e.test_kubectl import npu, row, verify


def test_a_holder_is_shown_with_its_card_and_those_that_wait_with_their_reasons(
    node: Node,
) -> None:
    before = row(npu(node, "-o", "wide"))
    assert (before["CARDS"], before["HEALTHY"], before["ALLOCATED"]) == ("8", "8", "0")
    assert before["API"] == "dra"
    node.apply([claim_pod("holds")])
    running(node, "holds")
    (card,) = verified(node, "holds", 1).cards
    held = row(npu(node, "pods"))
    assert (held["POD"], held["NODE"], held["CARD"]) == ("holds", node.name, f"npu{card}")
    now = row(npu(node))
    assert int(before["FREE"]) - int(now["FREE"]) == int(now["ALLOCATED"]) > 0
    assert row(npu(node, "top"))["POD"] == "holds"
    why_here = npu(node, "why", "holds").stdout
    assert f"Pod default/holds is on Node {node.name}" in why_here
    assert f"npu{card}, cores" in why_here

    none = selected('arch == "atom"')
    one = {"name": "npu", "exactly": {"deviceClassName": DRIVER, **none}}
    node.apply([template("nine", request(count=8)), template("odd", one)])
    node.apply([small("waits-for-all", of_template="nine"), small("odd", of_template="odd")])
    waits(node, "waits-for-all")
    assert "cannot allocate all claims" in npu(node, "why", "waits-for-all").stdout
    waits(node, "odd")
    found = json.loads(npu(node, "why", "odd", "-o", "json").stdout)
    assert "cannot allocate all claims" in found["scheduler"]
    assert any("of which none meet" in fact["text"] for fact in found["facts"]), found["facts"]


def test_a_job_can_run_under_the_profile_that_it_needs_and_not_under_the_runtimes(
    node: Node,
) -> None:
    """With the Warboys in use a claim gets an RNGD, whose jobs need io_uring."""
    warboys = {"deviceClassName": DRIVER, "count": 2, **selected('arch == "warboy"')}
    node.apply([template("warboys", {"name": "npu", "exactly": warboys})])
    node.apply([small("holds", of_template="warboys")])
    running(node, "holds")
    (row,) = verify(node, "--all")
    assert (row["node"], row["result"]) == (node.name, "passed")
    assert row["card"] not in ("-", "npu0", "npu1"), row
    (row,) = verify(node, node.name, "--seccomp=RuntimeDefault")
    assert row["result"] == "failed"
    assert row["finding"].startswith("io_uring: filtered by the Pod's seccomp profile"), row
    assert "Unconfined" in row["remedy"]
    # A namespace with less than the agent's: Kubernetes' own words say what it lacks.
    node.kubectl("create", "namespace", "team")
    node.kubectl("label", "namespace", "team", "pod-security.kubernetes.io/enforce=baseline")
    refused = npu(node, "verify", "--all", "--namespace=team", check=False)
    assert refused.returncode == 1
    assert 'violates PodSecurity "baseline' in refused.stderr
    (row,) = verify(node, "--all", "--namespace=team", "--seccomp=RuntimeDefault")
    assert row["finding"].startswith("io_uring: filtered")
    node.kubectl("delete", "namespace", "team")
