"""`npu-agent doctor`: run as a user runs it, by its options; and what its report looks like."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.process import free_port
from npu_agent.cli.catalogue import parse
from npu_agent.config import Config, ConfigError, default_config
from npu_agent.people import simulator
from npu_agent.people.commands.doctor import configuration, examine, parts
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.vendors import SPEC
from tests.golden import golden
from tests.kube.helpers import kubeconfig
from tests.outputs.deviceplugin.helpers import short_directory
from tests.people.doctor.helpers import RESOURCE, Node
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
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
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
    login.write_text(f"#!/bin/sh\necho $$ >> {pids}\nsleep 300\n", encoding="utf-8")
    login.chmod(0o755)
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(login)}
    config = kubeconfig(base, "https://127.0.0.1:1", user={"exec": run})
    options = (f"--plugin-dir={base}/device-plugins", f"--host-root={base}/host")
    _, out, _ = ran("doctor", *options, NODE_NAME="n1", KUBECONFIG=str(config))
    assert "a login program of the kubeconfig that hangs" in out
    assert pids.read_text(encoding="utf-8")
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


def test_a_host_without_kubernetes_is_checked_alone(base: Path) -> None:
    """It is good if its cards are, and the report says what was left out."""
    (base / "kubelet").mkdir()
    host = f"--host-root={base}/host"
    port = f"--metrics-listen=127.0.0.1:{free_port()}"
    code, out, err = ran("doctor", host, port, f"--plugin-dir={base}/none/device-plugins")
    assert (code, err) == (0, "")
    assert "note     Kubernetes" in out
    assert "only the host is checked" in out
    assert "Kubelet" not in out
    assert "API server" not in out
    # A kubelet that has no directory for plugins is one all the same.
    code, out, _ = ran("doctor", host, port, f"--plugin-dir={base}/kubelet/device-plugins")
    assert (code, "plugin directory" in out) == (1, True)
    simulator.apply_fault(base / "host", "npu0", "dead")
    code, out, _ = ran("doctor", host, port, f"--plugin-dir={base}/none/device-plugins")
    assert (code, "npu0 is unhealthy" in out) == (1, True)


def test_a_bad_file_is_a_line_and_the_rest_is_examined(base: Path) -> None:
    file = base / "config.yaml"
    file.write_text("interval: 5\nintervall: 5\n", encoding="utf-8")
    _, out, _ = ran("doctor", f"--config-file={file}", f"--host-root={base}/host")
    assert f"{file}:2: intervall: unknown key" in out
    assert f"$ npu-agent config check {file}" in " ".join(out.split())
    assert "2: npu0 (warboyB0), npu1 (warboyB0)" in out


# --- the configuration to check by


def given(*arguments: str | Path) -> tuple[Config, Check]:
    return configuration(parse(["doctor", *map(str, arguments)]))


def test_by_a_file_or_by_options_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("socketName: x\n", encoding="utf-8")
    for options, words in (
        (("--config-file", file), f"{file} is good"),
        (("--socket-name=x", "--interval=5"), "no file: options and defaults"),
    ):
        config, check = given(*options)
        assert config.socket_name == "x"
        assert check == Check("config", State.OK, words, section="Configuration")


@pytest.mark.parametrize("content", ["a: [", None])
def test_a_file_that_is_no_config_gives_the_defaults(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    config, check = given("--config-file", file)
    assert config == default_config(SPEC)
    assert check.state is State.WRONG
    assert str(file) in check.detail


@pytest.mark.parametrize(
    "wrong", [("--interval", "soon"), ("--config-file", "/missing", "--interval", "5")]
)
def test_wrong_use_is_no_line(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--"):
        given(*wrong)


# --- the report

GOLDEN = Path(__file__).parent / "report.txt"
LONG = Check(
    "resource " + "x" * 60,
    State.WRONG,
    "detail " * 40 + "D" * 120,
    "remedy " * 40 + "[bold]R[/]",
    "see --this",
    section="Kubelet",
)


def drawn(
    checks: tuple[Check, ...], width: int, columns: int | None, *, everything: bool = False
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    for part in parts(checks, everything=everything, columns=columns):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


async def test_the_report_of_a_good_node_begins_with_the_first_subject(node: Node) -> None:
    report = drawn(await examine(node.context), 80, 80)
    assert report.startswith("Running agent\nok ")
    assert report.endswith("19 ok\nNot shown: lines that do not apply here (1); --all shows them\n")


async def test_the_report_of_a_node_with_several_faults(node: Node) -> None:
    """First what to fix, in its order: what the agent reports, then the rest."""
    await node.kubelet.stop()
    (node.directory / "kubelet.sock").unlink(missing_ok=True)
    node.api.rights.discard(("patch", "nodes"))
    text = "npu1 is unhealthy: the driver reports the card dead"
    node.reports(problems=[{"subject": "card", "text": text, "remedy": "reset it"}])
    # Without what is another one each time: the temporary directory and the ports.
    base = str(node.root.parent)
    checks = tuple(
        replace(
            check, detail=re.sub(r"(?<=127.0.0.1:)\d+", "...", check.detail.replace(base, "/base"))
        )
        for check in await examine(node.context)
    )
    report = drawn(checks, 80, 80, everything=True)
    assert report == golden(GOLDEN, report)


def test_a_fault_of_many_cards_is_one_thing_to_fix() -> None:
    dead = Check("", State.WRONG, "it is dead", "reset it", "dmesg", section="Hardware")
    cards = tuple(replace(dead, name=f"card npu{index}") for index in range(64))
    other = replace(dead, name="kubelet.sock")
    found = drawn((*cards, other), 100, 100)
    assert found.startswith("2 things to fix, in this order:\n")
    assert "1.  card npu0, npu1, npu2, npu3 and 60 more: it is dead\n" in found
    assert found.count("-> reset it") == 2
    assert found.count("it is dead (see 1.)") == 64


def test_lines_are_not_cut_and_not_wider_than_the_terminal() -> None:
    for width in (40, 80, 400):
        found = drawn((LONG,), width, width)
        assert max(map(len, found.splitlines())) <= width
        first, _, section = found.partition("Kubelet\n")
        for part in (first, section):
            assert part.count("D") == 120
            assert part.replace("fix", "").count("x") == 60
        assert first.count("remedy") == 40
        assert "[bold]R[/]" in first
        assert "…" not in found


def test_in_a_pipe_a_name_is_on_one_line() -> None:
    assert LONG.name in drawn((LONG,), 400, None)
