"""What the context of the checks knows of an installation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.config import default_config
from npu_agent.kube import credentials
from npu_agent.people.doctor.check import Context, wrong
from npu_agent.vendors import SPEC, VENDOR
from tests.people.doctor.helpers import POD


def test_commands_are_for_how_the_agent_was_installed() -> None:
    """No command takes the defaults of k8s/ over image and config of an installation."""
    pod = replace(POD, namespace="npu-system")
    assert pod.restore_rights() == "kubectl apply -l npu-agent/rights -k OVERLAY"
    assert pod.apply_again() == "kubectl apply -k OVERLAY"
    assert "OVERLAY: the directory" in pod.overlay_is
    assert pod.agent_log.startswith("kubectl -n npu-system logs ")
    helm = replace(pod, helm_release="mine")
    assert helm.restore_rights() == (
        "helm get manifest mine --namespace npu-system | kubectl apply --server-side "
        "--force-conflicts --field-manager=helm -l npu-agent/rights -f -"
    )
    assert helm.apply_again() == (
        "helm upgrade mine k8s/chart --namespace npu-system --reset-then-reuse-values "
        "--force-conflicts"
    )
    assert helm.overlay_is == ""


def test_a_pod_knows_its_namespace_and_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "DIRECTORY", tmp_path)
    monkeypatch.delenv("HELM_RELEASE", raising=False)
    here = Context.here(default_config(SPEC), Path("/"), VENDOR(Path("/")))
    assert (here.namespace, here.helm_release) == ("kube-system", "")
    (tmp_path / "namespace").write_text("npu-system", encoding="utf-8")
    monkeypatch.setenv("HELM_RELEASE", "mine")
    here = Context.here(default_config(SPEC), Path("/"), VENDOR(Path("/")))
    assert (here.namespace, here.helm_release) == ("npu-system", "mine")


@pytest.mark.parametrize(
    ("command", "in_a_pod"),
    [
        ("", ""),
        ("kubectl get nodes", "kubectl get nodes"),
        (
            "npu-agent config check '/etc/a b'",
            "kubectl -n npu-system exec a-pod -- npu-agent config check '/etc/a b'",
        ),
        (
            "ls -l /dev/npu0*",
            (
                "kubectl -n npu-system debug node/node-7 -it --profile=sysadmin "
                "--image=$(kubectl -n npu-system get pod a-pod -o "
                "jsonpath='{.spec.containers[0].image}') "
                "-- chroot /host sh -c 'read _; ls -l /dev/npu0*'"
            ),
        ),
    ],
)
def test_who_reads_the_report_of_a_pod_types_its_commands_at_a_desk(
    command: str, in_a_pod: str
) -> None:
    pod = replace(POD, namespace="npu-system", hostname="a-pod", node_name="node-7")
    check = wrong("", "", command)
    assert pod.at_desk(check).command == in_a_pod
    assert replace(pod, in_pod=False).at_desk(check) == check
