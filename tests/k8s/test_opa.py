"""The policy for Open Policy Agent, run by the oldest OPA that it is for and by the newest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.tools import K8S, output

POLICY = K8S / "components" / "scheduler-name-opa"
VALUES = yaml.safe_load((K8S / "examples" / "opa-values.yaml").read_text(encoding="utf-8"))
MAIN: str = VALUES["bootstrapPolicies"]["main"]

both = pytest.mark.parametrize("opa", ["opa-0", "opa"])


@both
def test_the_policys_own_test_passes(opa: str) -> None:
    files = sorted(POLICY.glob("*.rego"))
    assert len(files) == 2
    assert "PASS: 10/10" in output(opa, "test", *files)
    output(opa, "check", "--strict", *files)


def test_the_policy_is_formatted() -> None:
    assert output("opa", "fmt", "--diff", *POLICY.glob("*.rego")) == ""


def test_the_charts_shell_leaves_main_as_it_is() -> None:
    assert not set("$`\\") & set(MAIN)


@both
@pytest.mark.parametrize(
    ("scheduler", "allowed"), [("npu-binpack-scheduler", True), ("default-scheduler", False)]
)
def test_main_answers_an_admission_review(
    opa: str, scheduler: str, allowed: bool, tmp_path: Path
) -> None:
    response = ask(opa, [POLICY / "scheduler_name.rego"], scheduler, tmp_path)
    message = response.pop("status", {}).get("message", "")
    assert response == {"uid": "1", "allowed": allowed}
    assert ("write schedulerName: npu-binpack-scheduler" in message) is not allowed


@both
def test_main_allows_while_no_policy_is_loaded(opa: str, tmp_path: Path) -> None:
    assert ask(opa, [], "default-scheduler", tmp_path) == {"uid": "1", "allowed": True}


def ask(opa: str, policies: list[Path], scheduler: str, directory: Path) -> dict[str, Any]:
    """The response to the creation of a Pod with an NPU, by the values' `main`."""
    main = directory / "main.rego"
    main.write_text(MAIN, encoding="utf-8")
    container = {"name": "main", "resources": {"limits": {"furiosa.ai/rngd": "1"}}}
    request = {
        "uid": "1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "object": {
            "metadata": {"name": "train"},
            "spec": {"containers": [container], "schedulerName": scheduler},
        },
    }
    data = [word for file in (main, *policies) for word in ("--data", file)]
    arguments = ("eval", "--format=raw", "--stdin-input", *data, "data.system.main")
    review = json.loads(output(opa, *arguments, stdin=json.dumps({"request": request})))
    assert review["kind"] == "AdmissionReview"
    response: dict[str, Any] = review["response"]
    return response
