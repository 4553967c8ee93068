"""Node Feature Discovery's own chart with our values."""

from __future__ import annotations

from tests.cluster.build import NFD, ensure_binaries
from tests.k8s.tools import K8S, by_kind, objects, output

TAINT = "beta.furiosa.ai/npu"


def test_the_worker_tolerates_our_taint_and_the_master_takes_our_labels() -> None:
    chart = ensure_binaries(NFD)["node-feature-discovery"]
    values = K8S / "examples" / "nfd-values.yaml"
    made = objects(output("helm", "template", "nfd", chart, "--values", values))

    worker = by_kind(made, "DaemonSet")["spec"]["template"]["spec"]
    assert {"key": TAINT, "operator": "Exists"} in worker["tolerations"]
    (master,) = (
        container
        for thing in made
        if thing["kind"] == "Deployment"
        for container in thing["spec"]["template"]["spec"]["containers"]
        if container["command"] == ["nfd-master"]
    )
    assert "-extra-label-ns=furiosa.ai,beta.furiosa.ai,alpha.furiosa.ai" in master["args"]
    (config,) = (
        thing["data"]["nfd-worker.conf"]
        for thing in made
        if thing["kind"] == "ConfigMap" and "nfd-worker.conf" in thing["data"]
    )
    (source,) = objects(config)
    assert source["sources"]["pci"] == {
        "deviceClassWhitelist": ["12"],
        "deviceLabelFields": ["vendor"],
    }
