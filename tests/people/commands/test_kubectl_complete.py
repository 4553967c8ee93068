"""Completion of `kubectl npu`; tests/e2e/test_kubectl.py has what the real kubectl makes of it."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from npu_agent.cli import main as cli
from tests.kube.helpers import kubeconfig
from tests.people.cluster.test_proxy import real
from tests.people.commands.test_kubectl import FORBIDDEN, PAGE, Cluster, cluster
from tests.processes import DEADLINE

__all__ = ["cluster"]
FILES, NO_FILES = ":0", ":4"
Typed = Callable[..., Awaitable[tuple[list[str], str]]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Completes the last of these words: the candidates, and the directive."""

    async def act(*words: str) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.argv", ["/bin/kubectl_complete-npu"])
        assert await asyncio.to_thread(cli.main, words) == 0
        *found, directive = capsys.readouterr().out.splitlines()
        return [line.partition("\t")[0] for line in found], directive

    return act


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("co",), ["cordon"]),
        (
            ("",),
            ["nodes", "pods", "node", "why", "top", "cordon", "uncordon", "drain", "verify"],
        ),
        (("-n", "ml", "dr"), ["drain"]),
        (("pods", "-o", ""), ["table", "wide", "json", "yaml", "name"]),
        (("-o", "j"), ["json"]),
        (("drain", "n2", "npu0", "--dr"), ["--dry-run"]),
        (("cordon", "--reason", ""), []),
        (("pods", ""), []),
        (("no-such-command",), []),
    ],
)
async def test_words_that_need_no_cluster(
    typed: Typed, words: tuple[str, ...], candidates: list[str]
) -> None:
    assert await typed(*words) == (candidates, NO_FILES)


async def test_a_kubeconfig_is_a_file(typed: Typed) -> None:
    assert await typed("--kubeconfig", "") == ([], FILES)


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("node", ""), ["n1", "n2"]),
        (("drain", "n2", ""), ["npu0", "npu1"]),
        (("verify", "n1", "n"), ["n1", "n2"]),
        (("drain", "--reason=fan", "n2", "npu1"), ["npu1"]),
        (("drain", "n2", "npu0", ""), []),
        (("why", "-n", "ml", "w"), ["waits"]),
        (("why", "w"), []),  # the namespace of the context has none
        (("pods", "-n", ""), ["kube-system", "ml"]),
    ],
)
async def test_names_of_the_cluster(
    typed: Typed, cluster: Cluster, words: tuple[str, ...], candidates: list[str]
) -> None:
    assert cluster.objects
    assert await typed(*words) == (candidates, NO_FILES)


async def test_a_completion_that_fails_has_no_candidates(
    typed: Typed, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.instead["/api/v1/pods"] = FORBIDDEN
    assert await typed("node", "") == ([], NO_FILES)
    assert await typed("--kubeconfig", str(tmp_path / "none"), "node", "") == ([], NO_FILES)


async def test_names_that_a_shell_would_expand_are_not_offered(
    typed: Typed, cluster: Cluster
) -> None:
    names = ("npu0", "npu1$(id)", "`id`", "npu;id", "npu 1", "0000:5e:00.0")
    card = PAGE["cards"][0]  # type: ignore[index]
    cluster.page = {**PAGE, "cards": [{**card, "name": name} for name in names]}
    assert await typed("drain", "n2", "") == (["npu0", "0000:5e:00.0"], NO_FILES)


@real
@pytest.mark.timeout(4 * DEADLINE)
def test_a_completion_ends_in_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        config = kubeconfig(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        # A kubectl that takes seconds to start asks nothing before the first of these.
        for seconds in (3, 15, 60):
            child = completed(seconds, config, tmp_path / "tmp")
            assert (child.returncode, child.stdout) == (0, f"{NO_FILES}\n")
            assert [*(tmp_path / "tmp").iterdir()] == []
            if select.select([server], [], [], 0)[0]:  # kubectl had asked
                return
    raise AssertionError("kubectl has never asked")


def completed(seconds: int, config: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Completes the name of a node, with this deadline."""
    code = (
        "import sys; from npu_agent.people.commands import kubectl_complete as complete; "
        f"from npu_agent.cli.main import main; complete._DEADLINE = {seconds}; "
        "sys.argv[0] = 'kubectl_complete-npu'; main(['node', ''])"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KUBECONFIG": str(config), "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
