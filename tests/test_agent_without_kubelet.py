"""`run --no-kubelet` and `npu-agent cdi`: a host without Kubernetes, on simulated cards."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_agent.agent import Agent, Host
from npu_agent.cli.main import main
from npu_agent.config import Effective, HealthConfig, MetricsConfig, default_config
from npu_agent.outputs.cdi import SpecDirectory
from npu_agent.people import simulator
from npu_agent.vendors import REGISTRY
from tests.processes import started
from tests.until import until, wait_until

SPEC = Path("etc", "cdi", "furiosa.ai-npu.json")
DEADLINE = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a Warboy and an RNGD."""
    root = tmp_path / "host"
    simulator.make(root, simulator.parse_cards("warboy=1,rngd=1"), plain_nodes=True)
    return root


def named(root: Path) -> set[str]:
    try:
        return {one["name"] for one in json.loads((root / SPEC).read_text())["devices"]}
    except FileNotFoundError:
        return set()


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def test_the_agent_watches_writes_specs_and_serves_pages_and_nothing_else(
    root: Path, tmp_path: Path
) -> None:
    plugins = tmp_path / "plugins"  # not there, and not made
    config = replace(
        default_config(REGISTRY),
        plugin_dir=str(plugins),
        health=HealthConfig(interval=0.05),
        metrics=MetricsConfig(listen="127.0.0.1:0"),
    )
    agent = Agent(Effective(config, {}), Host(root, None, kubelet=False))
    stop = asyncio.Event()
    running = asyncio.create_task(agent.run(stop))
    try:
        await until(lambda: {"npu0", "npu1:0-3", "all"} <= named(root))
        simulator.apply_fault(root, "npu0", "dead")
        await until(lambda: "npu0" not in named(root) and "npu1" in named(root))
        simulator.apply_fault(root, "npu0", "ok")
        await until(lambda: "npu0" in named(root))
        await until(lambda: agent.server.listening.value)
        address = agent.server.listening.value
        assert address
        url = f"http://{address[0]}:{address[1]}"
        assert (await asyncio.to_thread(get, f"{url}/readyz"))[0] == 200
        state = agent.state()
        assert (state.resources, state.dra, state.labels) == ((), (), None)
        assert not agent.restarts
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE):
            await running
    assert named(root), "the specs stay"
    assert not plugins.exists()


async def test_specs_that_cannot_be_written_are_a_problem_and_the_agent_is_not_ready(
    root: Path,
) -> None:
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "cdi").write_text("in the way")
    config = replace(default_config(REGISTRY), metrics=MetricsConfig(listen="127.0.0.1:0"))
    agent = Agent(Effective(config, {}), Host(root, None, kubelet=False))
    stop = asyncio.Event()
    running = asyncio.create_task(agent.run(stop))
    try:
        await until(lambda: agent.state().cdi_error)
        await until(lambda: agent.server.listening.value)
        address = agent.server.listening.value
        assert address
        status, body = await asyncio.to_thread(get, f"http://{address[0]}:{address[1]}/readyz")
        assert status == 503
        assert "the CDI specs cannot be written" in json.dumps(body)
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE):
            await running


def test_generate_writes_the_spec_and_lists_the_names(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cdi", "generate", "--host-root", str(root)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{root / SPEC} written"
    assert {line.removeprefix("furiosa.ai/npu=") for line in out[1:]} == named(root)


def test_generate_can_print_instead(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cdi", "--stdout", "--host-root", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "furiosa.ai/npu"
    assert not (root / SPEC).exists()


def test_generate_fails_clearly(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cdi", "--host-root", str(tmp_path)]) == 1
    assert "no NPU to offer" in capsys.readouterr().err
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "cdi").write_text("in the way")
    assert main(["cdi", "--host-root", str(root)]) == 1
    error = capsys.readouterr().err
    assert str(root / "etc" / "cdi") in error
    assert "move away the file that is in its place, or print the specs by --stdout" in error
    (root / "etc" / "cdi").unlink()
    (root / SPEC).mkdir(parents=True)
    assert main(["cdi", "--host-root", str(root)]) == 1
    error = capsys.readouterr().err
    assert f"{root / SPEC}: Is a directory: move away" in error
    assert "root, or" not in error


@pytest.mark.parametrize(
    ("number", "uid", "remedy"),
    [
        (errno.EACCES, 7, "run it as root, or print the specs by --stdout"),
        (errno.EPERM, 7, "run it as root, or print the specs by --stdout"),
        (errno.EPERM, 0, "Operation not permitted: print the specs by --stdout"),  # immutable
        (errno.EROFS, 0, "mount it writable, or print the specs by --stdout"),
        (errno.ENOSPC, 7, "No space left on device: print the specs by --stdout"),
    ],
)
def test_only_who_is_not_root_is_to_become_root(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    uid: int,
    remedy: str,
) -> None:
    async def fails(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SpecDirectory, "write", fails)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert main(["cdi", "--host-root", str(root)]) == 1
    assert capsys.readouterr().err.rstrip().endswith(remedy)


def test_generate_removes_a_spec_that_has_no_card_any_more(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cdi", "--host-root", str(root)]) == 0
    for name in ("npu0", "npu1"):
        simulator.apply_fault(root, name, "dead")
    assert main(["cdi", "--host-root", str(root)]) == 1
    assert not (root / SPEC).exists()
    assert "removed: there is no NPU to offer" in capsys.readouterr().out


def test_watch_prints_nothing_to_stdout(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cdi", "watch", "--stdout", "--host-root", str(root)]) == 2
    assert "--stdout goes with `cdi generate` only" in capsys.readouterr().err
    assert not (root / SPEC).exists()


def test_watch_keeps_the_spec_true_until_it_is_ended(root: Path) -> None:
    with started("cdi", "watch", "--host-root", root) as process:
        wait_until(lambda: "npu0" in named(root))
        simulator.apply_fault(root, "npu0", "gone")
        wait_until(lambda: named(root) and "npu0" not in named(root))
        code, _, log = process.end()
    assert code == 0
    assert named(root)
    assert "CDI specs written" in log
