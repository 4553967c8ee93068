"""The API server through kubectl: side by side with the real one, and with what is no kubectl."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.kube import Api, ApiError
from npu_agent.kube.credentials import at
from npu_agent.kube.request import Request
from npu_agent.people.cluster import proxy
from npu_agent.people.cluster.fetch import ObjectList
from npu_agent.people.cluster.proxy import Login, through_kubectl
from npu_agent.people.simulator.apiserver import served
from tests.kube.helpers import Authority, authority, kubeconfig
from tests.processes import none_is_left

_BUILT = sorted(Path.home().glob(".cache/npu-agent/kubernetes-*/kubectl"))
KUBECTL = str(_BUILT[-1]) if _BUILT else shutil.which("kubectl")
"""That of tests/cluster, if it was built: others may be wrappers that ask the server first."""
real = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl here")
PODS = Request("list", "Pod", ObjectList)
DEADLINE = 120.0
"""Seconds; guards against hanging and measures nothing."""
pytestmark = pytest.mark.timeout(4 * DEADLINE)
"""A kubectl may be a wrapper that takes seconds to start."""


@pytest.fixture(autouse=True)
def _in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if KUBECTL:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "kubectl").symlink_to(KUBECTL)
        in_path(tmp_path / "real" / "kubectl", monkeypatch)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"))


class Asked(list[tuple[str, dict[str, str]]]):
    """Paths with the headers that say who asks."""

    cluster: dict[str, str]
    """In a kubeconfig."""


@asynccontextmanager
async def serving(signed: Authority) -> AsyncIterator[Asked]:
    """An API server with no Pods. By TLS: kubectl sends no credentials without."""
    asked = Asked()
    connections = set[asyncio.Transport]()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport
        connections.add(request.transport)
        who = {
            name: value
            for name, value in request.headers.items()
            if name.startswith("Impersonate") or name == "Authorization"
        }
        asked.append((request.path, who))
        if request.path.endswith("/proxy/page"):
            raise web.HTTPFound("http://localhost/api/v1/secrets")
        kind = "PodList" if request.path.endswith("/pods") else "APIVersions"
        return web.json_response({"kind": kind, "metadata": {}})

    async with served(answer, signed.context()) as url:
        asked.cluster = {"server": url, "certificate-authority": str(signed.ca)}
        yield asked
    for connection in connections:
        with suppress(AttributeError):  # Python 3.11.2 cannot abort what is closed
            connection.abort()  # TLS would wait for the other side, and the loop ends now
    await asyncio.sleep(0)


async def ask(*flags: str) -> Login:
    """Lists Pods."""
    async with asyncio.timeout(DEADLINE), through_kubectl(flags) as (api, place):
        await api.ask(PODS)
        return place


@real
@pytest.mark.parametrize(
    ("context", "user", "path", "flags"),
    [
        ("prod/eu 1", {}, "", ()),
        ("a", {"as": "viewer", "as-groups": ["g1", "g2"], "as-uid": "42"}, "", ()),
        ("a", {"as": "viewer"}, "/", ("--context=b", "--as=admin", "--as-group=ops")),
        ("b", {}, "/k8s/clusters/c-1", ()),
        ("", {}, "", ()),
        ("a", {}, "", ("--context=nowhere",)),
    ],
)
async def test_a_kubeconfig_means_what_it_means_to_kubectl(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signed: Authority,
    context: str,
    user: dict[str, Any],
    path: str,
    flags: tuple[str, ...],
) -> None:
    async with serving(signed) as asked:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "contexts": [
                {"name": name, "context": {"cluster": "c", "user": "u", "namespace": namespace}}
                for name, namespace in (("a", "team"), ("b", ""), ("prod/eu 1", ""))
            ],
            "clusters": [
                {"name": "c", "cluster": asked.cluster | {"server": asked.cluster["server"] + path}}
            ],
            "users": [{"name": "u", "user": {"token": "t", **user}}],
        }
        (tmp_path / "config").write_text(json.dumps(content), encoding="utf-8")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

        theirs = await kubectl("get", "--raw", "/api/v1/pods", *flags)
        # kubectl 1.32 leaves out the path of the server's URL: who asks is what it is right about.
        expected = [(f"{path.rstrip('/')}/api/v1/pods", who) for _, who in asked]
        asked.clear()
        try:
            place = await ask(*flags)
        except ApiError:
            assert theirs is None
            assert not asked
            return
        assert theirs is not None
        assert asked[-1:] == expected[-1:]
        view = await kubectl("config", "view", "--raw", "--minify", "-ojson", *flags)
        config = json.loads(view or "")
        [current] = config["contexts"]
        assert place == Login(
            context=current["name"],
            server=config["clusters"][0]["cluster"]["server"],
            namespace=current["context"].get("namespace") or "default",
        )


async def kubectl(*arguments: str) -> str | None:
    """What it prints; None: it fails."""
    assert KUBECTL
    run = await asyncio.create_subprocess_exec(KUBECTL, *arguments, stdout=PIPE, stderr=DEVNULL)
    async with asyncio.timeout(DEADLINE):
        printed, _ = await run.communicate()
    return printed.decode() if run.returncode == 0 else None


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def in_path(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")


def logs_in(path: Path, script: str) -> dict[str, Any]:
    """The user of a kubeconfig with a login program."""
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(program(path, script)),
        "interactiveMode": "IfAvailable",
    }
    return {"exec": run}


TOKEN = json.dumps(
    {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "fresh"},
    }
)


@real
@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_login_program_talks_to_the_person(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    signed: Authority,
    succeeds: bool,
) -> None:
    script = "echo 'enter ABCD' >&2; " + (f"echo '{TOKEN}'" if succeeds else "exit 3")
    async with serving(signed) as asked:
        user = logs_in(tmp_path / "login", script)
        path = kubeconfig(tmp_path, "", user=user, cluster=asked.cluster)
        monkeypatch.setenv("KUBECONFIG", str(path))
        if succeeds:
            await ask()
            assert asked[-1][1] == {"Authorization": "Bearer fresh"}
        else:
            with pytest.raises(ApiError, match=r"login failed with exit code 3\): try `kubectl v"):
                await ask()
    assert "enter ABCD" in capfd.readouterr().err


@real
async def test_a_login_program_that_hangs_ends_at_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at("http://h", "loads the library, which takes long")
    monkeypatch.setattr(proxy, "_LOGIN", 2.0)
    monkeypatch.setattr(proxy, "_START", 20.0)  # within which a kubectl of gcloud logs in
    user = logs_in(tmp_path / "login", "exec sleep 60")  # which ends with the command
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://h", user=user)))
    with pytest.raises(ApiError, match=r"has not answered within 2 s|was not ready within 20 s"):
        await ask()


@real
async def test_a_page_leads_nowhere_else_with_a_persons_rights(
    tmp_path: Path, signed: Authority
) -> None:
    """Through kubectl's socket each host that a redirect names is the API server."""
    async with serving(signed) as asked:
        path = kubeconfig(tmp_path, "", cluster=asked.cluster)
        flags = (f"--kubeconfig={path}",)
        async with asyncio.timeout(DEADLINE), through_kubectl(flags) as (api, _):
            page = Request("get", "Pod", object, namespace="n", name="p:", subresource="proxy/page")
            with pytest.raises(ApiError, match="leads to http://localhost/api/v1/secrets: no redi"):
                await api.ask(page)
        assert "/api/v1/secrets" not in [path for path, _ in asked]


@real
async def test_a_kubectl_that_is_a_script_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: Authority
) -> None:
    """It does not hand signals on to the kubectl that it runs."""
    in_path(program(tmp_path / "kubectl", f'{KUBECTL} "$@"; exit $?'), monkeypatch)
    async with serving(signed) as asked:
        path = kubeconfig(tmp_path, "", cluster=asked.cluster)
        await ask(f"--kubeconfig={path}")
    none_is_left(str(path))


@real
async def test_a_second_signal_leaves_no_kubectl_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: Authority
) -> None:
    done: list[str] = []
    end, close = proxy._end, Api.close

    async def closes(api: Api) -> None:  # the signal would end it here
        done.append("closed")
        await close(api)

    def ends(pid: int) -> None:
        done.append("ended")
        end(pid)

    monkeypatch.setattr(proxy, "_end", ends)
    monkeypatch.setattr(Api, "close", closes)
    async with serving(signed) as asked:
        await ask(f"--kubeconfig={kubeconfig(tmp_path, '', cluster=asked.cluster)}")
    assert done == ["ended", "closed"]


KILLED = """
import asyncio, sys
from npu_agent.people.cluster.proxy import through_kubectl

async def main():
    async with through_kubectl(sys.argv[1:]):
        print("open", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@real
@pytest.mark.parametrize("script", ['exec {} "$@"', '{} "$@"; exit $?'])
async def test_after_sigkill_no_kubectl_has_the_persons_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: Authority, script: str
) -> None:
    in_path(program(tmp_path / "kubectl", script.format(KUBECTL)), monkeypatch)
    async with serving(signed) as asked:
        path = kubeconfig(tmp_path, "", cluster=asked.cluster)
        command = (sys.executable, "-c", KILLED, f"--kubeconfig={path}")
        run = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert run.stdout
        async with asyncio.timeout(DEADLINE):
            assert await run.stdout.readline() == b"open\n"
        run.kill()
        await run.wait()
        await asyncio.to_thread(none_is_left, str(path))


async def test_without_kubectl_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ApiError, match=r"kubectl is not in PATH.*: install it") as caught:
        await ask()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "seconds", "words"),
    [
        ("exit 2", 60.0, "does not start: it ended with 2: try `kubectl version`"),
        ("echo hello; exec sleep 60", 0.5, "does not start: it was not ready within 0.5 s"),
    ],
)
async def test_programs_that_are_no_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seconds: float, words: str
) -> None:
    monkeypatch.setattr(proxy, "_START", seconds)
    in_path(program(tmp_path / "kubectl", script), monkeypatch)
    with pytest.raises(ApiError) as caught:
        await ask()
    assert words in str(caught.value)


async def test_a_kubectl_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ApiError, match="kubectl cannot be run"):
        await ask()
