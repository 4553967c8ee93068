"""`npu-agent doctor`, run as a user runs it: beside a real agent, with its real options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bench.process import free_port
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import StandInKubelet
from tests.kube.helpers import kubeconfig
from tests.outputs.deviceplugin.helpers import short_directory
from tests.people.doctor.helpers import RESOURCE
from tests.processes import DEADLINE, none_is_left, ran, started


@pytest.fixture
def base() -> Iterator[Path]:
    with short_directory() as base:
        (base / "device-plugins").mkdir()
        simulator.make(base / "host", simulator.parse_cards("warboy=2"), plain_nodes=True)
        yield base


def config_file(base: Path) -> Path:
    file = base / "config.yaml"
    lines = (
        f"pluginDir: {base}/device-plugins",
        f"metrics: {{listen: '127.0.0.1:{free_port()}', probes: '127.0.0.1:{free_port()}'}}",
        "labels: {output: none}",
        "events: false",
        "cordon: false",
    )
    file.write_text("\n".join(lines) + "\n")
    return file


async def test_beside_a_running_agent(base: Path) -> None:
    """What is looked for is what a real agent leaves, writes and answers."""
    file = config_file(base)
    kubelet = StandInKubelet(base / "device-plugins", base / "pod-resources")
    await kubelet.start()
    try:
        with started("run", f"--config-file={file}", f"--host-root={base}/host") as agent:
            await kubelet.until(RESOURCE, lambda plugin: len(plugin.devices) == 2, DEADLINE)
            await asyncio.to_thread(agent.said, "serving metrics and status")
            options = ("--format=json", f"--config-file={file}", f"--host-root={base}/host")
            code, out, err = await asyncio.to_thread(ran, "doctor", *options)
        assert err == ""
        lines = {line["name"]: line for line in json.loads(out)}
        states = {name: line["state"] for name, line in lines.items()}
        unused = ["cgroups", "API server", "DRA"]
        assert sorted(name for name, state in states.items() if state == "n/a") == sorted(unused)
        assert [line for line in lines.values() if line["state"] not in ("ok", "n/a")] == []
        assert states.keys() > {"config", "agent", "cards", "kubelet.sock", "other plugins"}
        assert code == 0
        assert f"pid {agent.pid}, since" in lines["serving agent"]["detail"]
        assert "an npu-agent answers" in lines["metrics.listen"]["detail"]
    finally:
        await kubelet.stop()


def test_a_login_program_that_hangs_ends_with_it(base: Path) -> None:
    login, pids = base / "login", base / "pids"
    login.write_text(f"#!/bin/sh\necho $$ >> {pids}\nsleep 300\n")
    login.chmod(0o755)
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(login)}
    config = kubeconfig(base, "https://127.0.0.1:1", user={"exec": run})
    options = (f"--plugin-dir={base}/device-plugins", f"--host-root={base}/host")
    _, out, _ = ran("doctor", *options, NODE_NAME="n1", KUBECONFIG=str(config))
    assert "a login program of the kubeconfig that hangs" in out
    assert pids.read_text()
    none_is_left(str(login))


def test_the_table(base: Path) -> None:
    file = config_file(base)
    code, out, err = ran("doctor", f"--config-file={file}", f"--host-root={base}/host")
    assert (code, err) == (1, "")
    assert out.startswith("1 thing to fix, in this order:\n\n1.  kubelet.sock: ")
    assert "Not shown: lines that do not apply here" in out
    _, out, _ = ran("doctor", "--all", f"--config-file={file}", f"--host-root={base}/host")
    assert "n/a" in out
    assert "Not shown" not in out


@pytest.fixture
def laptop() -> Iterator[Path]:
    """The root of a host without NPUs and without a kubelet; short, as sockets need it."""
    with short_directory() as root:
        for directory in ("sys/class", "sys/fs/cgroup", "dev"):
            (root / directory).mkdir(parents=True)
        yield root


def test_a_host_that_is_no_node_is_one_line(laptop: Path) -> None:
    options = (f"--host-root={laptop}", f"--plugin-dir={laptop}/device-plugins")
    code, out, err = ran("doctor", *options)
    assert (code, err) == (1, "")
    (line,) = out.splitlines()
    assert line.startswith(
        "this host is not an NPU node: no NPU, no driver for one, and no kubelet"
    )
    assert "`npu-agent demo`" in line
    # Everything is there for whoever wants it, and for programs.
    code, out, _ = ran("doctor", "--all", *options)
    assert (code, out.splitlines()[0]) == (1, "1 thing to fix, in this order:")
    code, out, _ = ran("doctor", "-o", "yaml", *options)
    assert code == 1
    assert {"plugin directory", "cards"} < {line["name"] for line in yaml.safe_load(out)}


@pytest.mark.parametrize("sign", ["device-plugins/", "sys/bus/pci/devices/0000:01:00.0/vendor"])
def test_a_host_with_any_sign_of_a_node_is_one(laptop: Path, sign: str) -> None:
    directory, _, file = sign.rpartition("/")
    (laptop / directory).mkdir(parents=True)
    if file:
        (laptop / sign).write_text("0x1ed2\n")
    options = (f"--host-root={laptop}", f"--plugin-dir={laptop}/device-plugins")
    assert "to fix, in this order:" in ran("doctor", *options)[1]


def test_a_bad_file_is_a_line_on_any_host_and_the_rest_is_examined(laptop: Path) -> None:
    file = laptop / "config.yaml"
    file.write_text(f"pluginDir: {laptop}/none\nintervall: 5\n")
    _, out, _ = ran("doctor", f"--config-file={file}", f"--host-root={laptop}")
    assert f"{file}:2: intervall: unknown key" in out
    assert f"$ npu-agent config check {file}" in out
    assert f"{laptop}/none is missing" in out
