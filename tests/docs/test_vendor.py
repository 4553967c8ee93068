"""docs/dev/add-a-vendor.md works as it is written: one agent serves the cards of both vendors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.outputs.deviceplugin.helpers import short_directory

from .pages import ROOT, page

PAGE = page("docs/dev/add-a-vendor.md")

RUN = '''
import asyncio, json, sys, urllib.request
from pathlib import Path

from npu_agent.people import simulator
from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import Host
from npu_agent.agent.run import serve
from npu_agent.config import parse
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.vendors import REGISTRY

BOTH = {"beta.furiosa.ai/npu": 2, "acme.example/anvil": 2}
CONFIG = """
resources: [{{name: acme.example/anvil, family: anvil, coresPerDevice: 1}}]
pluginDir: {directory}/plugins
health: {{interval: 0.05}}
labels: {{output: nfd}}
metrics: {{listen: "127.0.0.1:0", interval: 1}}
"""


def page(url):
    return urllib.request.urlopen(url).read().decode()


async def until(get, good):
    async with asyncio.timeout(20):
        while not good(found := await asyncio.to_thread(get)):
            await asyncio.sleep(0.02)
    return found


async def main(directory):
    root = directory / "host"
    simulator.make(root, simulator.parse_cards("warboy=2,anvil=1"), plain_nodes=True)
    features = root / "etc/kubernetes/node-feature-discovery/features.d"
    features.mkdir(parents=True)
    (directory / "plugins").mkdir()
    kubelet = StandInKubelet(directory / "plugins", directory / "pod-resources")
    await kubelet.start()
    config = parse(CONFIG.format(directory=directory).encode(), "config", REGISTRY)
    agent = Agent(config, Host(root, "node"))
    stop = asyncio.Event()
    running = asyncio.create_task(serve(agent, stop))
    found = {"listed": {}, "granted": {}}
    for name, count in BOTH.items():
        plugin = await kubelet.until(name, lambda p: len(p.healthy()) == count, 20)
        found["listed"][name] = [id_ for id_, _ in plugin.devices]
        grant = await kubelet.allocate(name, 1)
        found["granted"][name] = [list(grant.ids), dict(grant.environment), list(grant.nodes)]
    async for address in agent.pages.server.listening.watch():
        if address:
            break
    url = f"http://{address[0]}:{address[1]}/metrics"
    assigned = ("acme_assigned{", "furiosa_npu_assigned{", "acme_temperature{")
    found["metrics"] = await until(
        lambda: page(url), lambda text: all(name in text for name in assigned)
    )
    labels = lambda: "".join(path.read_text() for path in features.iterdir())
    found["labels"] = await until(labels, lambda text: "acme" in text)
    simulator.apply_fault(root, "npu2", "dead")
    await kubelet.until("acme.example/anvil", lambda p: not p.healthy(), 20)
    others = kubelet.plugins.value["beta.furiosa.ai/npu"]
    found["others"] = len(others.healthy())
    stop.set()
    await running
    await kubelet.stop()
    print(json.dumps(found))


asyncio.run(main(Path(sys.argv[1])))
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the page's folders and its lines; the directory to import it from."""
    where = tmp_path_factory.mktemp("package")
    shutil.copytree(
        ROOT / "npu_agent", where / "npu_agent", ignore=shutil.ignore_patterns("__pycache__")
    )
    copies = re.findall(r"Copy `(\S+)` to `(\S+)`", PAGE.text)
    assert len(copies) == 2
    for example, folder in copies:
        shutil.copytree(ROOT / example, where / "npu_agent" / folder)
    diffs = [code for language, code in PAGE.blocks if language == "diff"]
    tables = ("npu_agent/vendors/__init__.py", "npu_agent/people/simulator/cards.py")
    for name, diff in zip(tables, diffs, strict=True):
        (where / name).write_text(
            applied(diff, (where / name).read_text(encoding="utf-8")), encoding="utf-8"
        )
    return where


def applied(diff: str, text: str) -> str:
    """The text with the lines that the diff adds, each after the line that it leaves."""
    at = 0
    for line in diff.splitlines(keepends=True):
        if line.startswith(" "):
            found = text.find(line[1:], at)
            assert found >= 0, line
            at = found + len(line) - 1
        elif line.startswith("+"):
            text = text[:at] + line[1:] + text[at:]
            at += len(line) - 1
    return text


def run(package: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    # Where it runs comes first on Python's path.
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=60)


def test_an_agent_with_cards_of_both_vendors(package: Path) -> None:
    with short_directory() as directory:
        done = run(package, "-c", RUN, directory)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    ours, theirs = found["granted"]["beta.furiosa.ai/npu"], found["granted"]["acme.example/anvil"]
    anvil = found["listed"]["acme.example/anvil"]
    assert [id_.partition("_")[2] for id_ in anvil] == ["cores_0", "cores_1"]
    assert not set(anvil) & set(found["listed"]["beta.furiosa.ai/npu"])
    assert ours[0][0] in found["listed"]["beta.furiosa.ai/npu"]
    assert ours[1] == {"NPU_DEVNAME": "npu0pe0-1", "FURIOSA_DEVICES": "npu:0:0-1"}
    assert theirs[1] == {"ANVIL_CORES": "2:0"}
    assert "/dev/npu0" in ours[2]
    assert not any("anvil" in node for node in ours[2])
    assert theirs[2] == ["/dev/anvil2", "/dev/anvil2c0"]

    labels = found["labels"].splitlines()
    assert "beta.furiosa.ai/npu.count=2" in labels
    assert "acme.example/anvil.count=1" in labels
    assert "acme.example/driver.version=1.0.0" in labels

    metrics = found["metrics"].splitlines()
    assert any(line.startswith("acme_temperature{") and 'label="chip"' in line for line in metrics)
    held = [line for line in metrics if re.match(r"\w+_assigned{", line)]
    assert sorted(re.findall(r'^(\w+)\{arch="(\w+)"', line)[0] for line in held) == [
        ("acme_assigned", "anvil"),
        ("furiosa_npu_assigned", "warboy"),
    ]
    assert not any(line.startswith("furiosa") and "anvil" in line for line in metrics)
    assert found["others"] == 2, "cards of one vendor are not harmed by those of the other"


def test_the_commands_know_both(package: Path, tmp_path: Path) -> None:
    simulated = run(
        package, "-m", "npu_agent", "simulate", tmp_path / "host", "--cards", "rngd,anvil", "--once"
    )
    assert simulated.returncode == 0, simulated.stderr
    shown = run(package, "-m", "npu_agent", "info", "--host-root", tmp_path / "host")
    assert "Acme Anvil" in shown.stdout
    assert "FuriosaAI RNGD" in shown.stdout
    text = run(package, "-m", "npu_agent", "run", "--help").stdout
    assert "(default: beta.furiosa.ai/npu)" in " ".join(text.split())
    refused = run(package, "-m", "npu_agent", "run", "--resources", "a.b/c=anvl")
    assert "anvil, rngd or warboy, not anvl: did you mean anvil?" in refused.stderr
