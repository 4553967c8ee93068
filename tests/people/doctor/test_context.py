"""The configuration that the doctor goes by, also when the file is bad."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.cli.catalogue import parse
from npu_agent.config import Config, ConfigError, default_config
from npu_agent.kube import credentials
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.doctor.context import Context, configuration
from npu_agent.vendors import REGISTRY
from tests.people.doctor.helpers import POD


def given(*arguments: str | Path) -> tuple[Config, Check]:
    return configuration(parse(["doctor", *map(str, arguments)]), REGISTRY)


def line(detail: str) -> Check:
    return Check("config", State.OK, detail, section="Configuration")


def test_a_file_or_options_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("socketName: x\n")
    for options, words in (
        (("--config-file", file), f"{file} is good"),
        (("--socket-name=x", "--interval=5"), "no file: options and defaults"),
    ):
        found, check = given(*options)
        assert found.socket_name == "x"
        assert check == line(words)
    assert given() == (default_config(REGISTRY), line("no file: options and defaults"))


@pytest.mark.parametrize("content", ["socketName: x\ndefautPe: Single\n", "a: [", None])
def test_of_a_bad_file_the_defaults(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_text(content)
    found, check = given("--config-file", file)
    assert found == default_config(REGISTRY)
    assert check.state is State.WRONG
    assert str(file) in check.detail
    assert check.command == f"npu-agent config check {file}"


@pytest.mark.parametrize(
    "wrong", [("--interval", "soon"), ("--config-file", "/missing", "--interval", "5")]
)
def test_wrong_use_is_no_line(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--"):
        given(*wrong)


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
    here = Context.here(default_config(REGISTRY), Path("/"), ())
    assert (here.namespace, here.helm_release) == ("kube-system", "")
    (tmp_path / "namespace").write_text("npu-system")
    monkeypatch.setenv("HELM_RELEASE", "mine")
    here = Context.here(default_config(REGISTRY), Path("/"), ())
    assert (here.namespace, here.helm_release) == ("npu-system", "mine")
