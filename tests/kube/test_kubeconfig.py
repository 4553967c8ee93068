"""A kubeconfig that cannot be used: what a developer is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_agent.kube.credentials import CredentialsError, of_kubeconfig
from tests.kube.helpers import kubeconfig

VERSION = "client.authentication.k8s.io/v1"


def refused(path: object) -> CredentialsError:
    with pytest.raises(CredentialsError) as caught:
        of_kubeconfig(str(path))
    assert str(caught.value).isprintable()
    return caught.value


CONTEXT = "current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n"
CLUSTER = f"{CONTEXT}clusters: [{{name: c, cluster: {{server: 'http://h'}}}}]\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ""),
        ("[]", ""),
        ("{", "while parsing"),
        ("current-context: x\ncontexts: []\nclusters: []", "Expected object with name x"),
        (CLUSTER.replace("http:", "https:") + "users: [{name: u, user: {tokenFile: /none}}]", ""),
    ],
)
def test_one_that_cannot_be_used(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    error = refused(path)
    assert error.what.startswith(f"the kubeconfig {path}")
    assert words in error.what
    assert "set KUBECONFIG to another file" in error.remedy or not error.remedy


def login_program(directory: Path, script: str) -> dict[str, Any]:
    """The user of a kubeconfig whose login program does this."""
    program = directory / "login"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"exec": {"apiVersion": VERSION, "command": str(program)}}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'no session:' >&2; echo log in >&2; exit 3", "returned 3. no session: log in"),
        ("echo hello", "failed to decode process output"),
    ],
)
def test_a_login_program_that_fails(tmp_path: Path, script: str, words: str) -> None:
    path = kubeconfig(tmp_path, "http://h", user=login_program(tmp_path, script))
    assert words in refused(path).what
