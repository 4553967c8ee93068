"""What is made of a kubeconfig: the library reads it, and its answer is what the client takes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.kube.credentials import Credentials, CredentialsError
from tests.kube.helpers import kubeconfig

Load = Callable[[object], Credentials]
VERSION = "client.authentication.k8s.io/v1"


@pytest.fixture(scope="module")
def load() -> Load:
    # Not at the top: the library takes half a second to load.
    from npu_agent.kube.kubeconfig import load

    return lambda path: load(str(path))


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def refused(load: Load, path: object) -> CredentialsError:
    with pytest.raises(CredentialsError) as caught:
        load(path)
    assert str(caught.value).isprintable()
    return caught.value


def test_what_a_cluster_and_a_user_have(load: Load, tmp_path: Path) -> None:
    def pem(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    (tmp_path / "ca.crt").write_text("CA")
    cluster = {
        "certificate-authority": "ca.crt",
        "tls-server-name": "kubernetes.example",
        "proxy-url": "http://proxy:3128",
        "insecure-skip-tls-verify": True,
    }
    user = {"client-certificate-data": pem("CERT"), "client-key-data": pem("KEY"), "token": "t"}
    path = kubeconfig(tmp_path, "https://h:6443/", cluster=cluster, user=user)
    found = load(path)
    assert found.server == "https://h:6443"
    assert found.source == f"the kubeconfig {path}"
    assert found.authorization == "Bearer t"
    assert found.ca == str(tmp_path / "ca.crt")
    assert found.certificate
    assert Path(found.certificate).read_text() == "CERT"
    assert found.key
    assert Path(found.key).read_text() == "KEY"
    assert found.server_name == "kubernetes.example"
    assert found.proxy == "http://proxy:3128"
    assert not found.verify


@pytest.mark.parametrize("context", [{"cluster": "c"}, {"cluster": "c", "user": ""}])
def test_without_a_user(load: Load, tmp_path: Path, context: dict[str, str]) -> None:
    """As for `kubectl proxy`, which has the credentials; kubectl writes the second form."""
    path = kubeconfig(tmp_path, "http://h")
    content = yaml.safe_load(path.read_text())
    content["contexts"][0]["context"] = context
    path.write_text(yaml.safe_dump(content))
    assert load(path).authorization is None


CONTEXT = "current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n"
CLUSTER = f"{CONTEXT}clusters: [{{name: c, cluster: {{server: 'http://h'}}}}]\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ""),
        ("[]", ""),
        ("{", "while parsing"),
        ("current-context: x\ncontexts: []\nclusters: []", "Expected object with name x"),
        (f"{CONTEXT}clusters: [{{name: c, cluster: {{a: b}}}}]", "its cluster has no server"),
        (CLUSTER.replace("http:", "https:") + "users: [{name: u, user: {tokenFile: /none}}]", ""),
        (f"{CLUSTER}users: [{{name: u, user: {{token: ключ}}}}]", "more than one line"),
        (CLUSTER.replace("http://h", "http://[1::2:3"), "Invalid IPv6 URL"),
    ],
)
def test_one_that_cannot_be_used(load: Load, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    error = refused(load, path)
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
def test_a_login_program_that_fails(load: Load, tmp_path: Path, script: str, words: str) -> None:
    path = kubeconfig(tmp_path, "http://h", user=login_program(tmp_path, script))
    assert words in refused(load, path).what


HTTPS = "https://10.96.0.1:6443"


@pytest.mark.parametrize(
    ("server", "environment", "expected"),
    [
        (HTTPS, {}, None),
        (HTTPS, {"HTTPS_PROXY": "http://p:3128"}, "http://p:3128"),
        (HTTPS, {"https_proxy": "p:3128"}, "http://p:3128"),
        (HTTPS, {"HTTP_PROXY": "http://p:3128"}, None),
        ("http://10.96.0.1", {"HTTP_PROXY": "http://p:3128"}, "http://p:3128"),
        (HTTPS, {"HTTPS_PROXY": "http://p", "NO_PROXY": "a, 10.96.0.1"}, None),
        ("https://api.local", {"HTTPS_PROXY": "http://p", "NO_PROXY": ".local"}, None),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://p"}, None),
    ],
)
def test_the_proxy_of_the_environment(
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load(kubeconfig(tmp_path, server)).proxy == expected
