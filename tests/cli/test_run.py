"""`npu-agent run --simulate`: what it makes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_agent.cli import run
from npu_agent.cli.main import main
from npu_agent.people import simulator
from npu_agent.people.simulator.cards import card
from tests.inventory.helpers import tree
from tests.outputs.deviceplugin.helpers import short_directory
from tests.processes import started
from tests.until import wait_until

ANYWHERE = "127.0.0.1:0"
QUIET = ("--labels-output=none", f"--metrics-listen={ANYWHERE}", f"--metrics-probes={ANYWHERE}")


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """What `run` does with SIGTERM is undone."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_simulated_cards_are_alive_break_and_are_null_in_containers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--simulate", "warboy=1,rngd=1", "--host-root", str(tmp_path), *QUIET)
    with (
        short_directory() as plugins,
        started(
            *("run", *words, "--plugin-dir", str(plugins)), by=("env", "NODE_NAME=node-1")
        ) as agent,
    ):
        agent.said("starts")
        assert main(["cdi", "generate", "--stdout", "--host-root", str(tmp_path)]) == 0
        devices = json.loads(capsys.readouterr().out)["devices"]
        nodes = [node for one in devices for node in one["containerEdits"]["deviceNodes"]]
        assert {node["hostPath"] for node in nodes} == {os.devnull}
        assert "/dev/rngd/npu1pe0" in {node["path"] for node in nodes}
        wait_until(lambda: simulator.cards(tmp_path)[0].telemetry.ticks > 0)
        warboy, _ = simulator.cards(tmp_path)
        assert warboy.spec.uuid != card("warboy", 0).uuid  # each node has its own
        assert main(["simulate", str(tmp_path), "fault", "npu0", "dead"]) == 0
        assert "card=npu0" in agent.said("card unhealthy")
        code, _, err = agent.end()
    assert (code, "Traceback" in err) == (0, False)


def test_the_end_does_not_wait_for_python_to_unload_its_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(print, 'unloading', file=sys.stderr)\n",
        encoding="utf-8",
    )
    with (
        short_directory() as plugins,
        started(
            *("run", *QUIET, "--host-root", str(tmp_path), "--plugin-dir", str(plugins)),
            by=("env", f"PYTHONPATH={tmp_path}"),
        ) as agent,
    ):
        agent.said("serving")
        code, _, err = agent.end()
    assert (code, "unloading" in err) == (0, False)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("wrboy=2", "--simulate 'wrboy=2': unknown family 'wrboy'; did you mean 'warboy'?"),
        ("warboy=60,rngd=5", "more than 64 cards in all"),
        ("warboy=x", "'x' is not a number of cards; right is e.g. warboy=2"),
    ],
)
def test_a_wrong_list_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: str, message: str
) -> None:
    assert main(["run", "--simulate", wanted, "--host-root", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_host_itself_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--simulate", "warboy=1"]) == 1
    assert "--simulate, --host-root: / is this host itself" in capsys.readouterr().err


@pytest.mark.parametrize("driver", [True, False], ids=["with a driver", "on the bus alone"])
def test_a_node_with_real_cards_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: bool,
) -> None:
    real = tree(tmp_path / "real", "warboy=1")
    if not driver:
        for entry in (real / "sys/class/npu_mgmt").iterdir():
            entry.unlink()
    monkeypatch.setattr(run, "THIS_HOST", real)
    monkeypatch.setenv("NODE_NAME", "node-1")
    root = tmp_path / "root"
    root.mkdir()
    assert main(["run", "--simulate", "warboy=1", "--host-root", str(root)]) == 1
    found = "npu0, 0000:01:00.0 (1ed2:0000)" if driver else "0000:01:00.0 (1ed2:0000)"
    said = capsys.readouterr().err
    assert f"--simulate warboy=1: this node has real cards ({found})" in said
    assert "kubectl label node node-1 npu-agent/enabled=false" in said
    assert not list(root.iterdir())
