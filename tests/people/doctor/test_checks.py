"""What a simulated node is not: other users, mounts, hangs, a host instead of a Pod."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.config import MetricsConfig, TlsConfig
from npu_agent.config.schema import (
    AllocationConfig,
    HealthConfig,
    LabelsConfig,
    NodeApi,
    ResourceSpec,
)
from npu_agent.core.hardware import SkippedDevice
from npu_agent.files import SIMULATION
from npu_agent.kube import Api
from npu_agent.kubelet.lock import lock_path
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.tls import Certificates, TlsFiles
from npu_agent.people import running
from npu_agent.people.commands.doctor import examine, run
from npu_agent.people.doctor import agent, cluster, dra, host
from npu_agent.people.doctor.check import (
    SUDO,
    Check,
    CheckTiming,
    Context,
    Lines,
    State,
    Unknown,
)
from tests.kube.helpers import hangs, serving
from tests.outputs.web.certificates import authority, placed
from tests.outputs.web.helpers import Scene
from tests.outputs.web.helpers import serving as pages
from tests.people.doctor.helpers import POD, Node, locked

HOST = replace(POD, in_pod=False, host_root=Path("/"))
UNREAD = (SkippedDevice("/sys/x", "hangs", unread=True),)


@contextmanager
def ordinary_user() -> Iterator[int]:
    """The whole process is nobody for a while."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(65534)
    try:
        yield 65534
    finally:
        os.seteuid(0)


# --- directories and users


@pytest.mark.parametrize(
    ("found", "context", "state"),
    [
        (("", "is missing"), POD, State.WRONG),
        (("", "is mounted read-only"), POD, State.WRONG),
        (("uid 0, gid 0, mode 0750", "may not be written"), replace(POD, uid=7), State.WRONG),
        (("uid 0, gid 0, mode 0750", "may not be written"), replace(HOST, uid=7), State.UNKNOWN),
        (("uid 0, gid 0, mode 0750", ""), replace(HOST, uid=7), State.OK),
    ],
)
async def test_the_rights_on_a_directory(
    found: tuple[str, str], context: Context, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "look", lambda *_, **__: found)
    try:
        line = await host.usable(context, Path("/x"), "the remedy", write=True)
    except Unknown as error:
        line = error.check
    assert line.state is state
    assert line.remedy == {State.OK: "", State.WRONG: "the remedy", State.UNKNOWN: SUDO}[state]
    commands = {True: "kubectl apply -k OVERLAY", False: "ls -ld /x"}
    assert line.command == (commands[context.in_pod] if state is State.WRONG else "")


def test_kinds_of_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, fault in (
        ("", ""),
        ("file", "is not a directory"),
        ("file/below", "is missing"),
        ("missing", "is missing"),
    ):
        assert host.look(tmp_path / name, write=True)[1] == fault
    assert dra.existing(tmp_path / "a" / "b") == tmp_path
    tmp_path.chmod(0o500)
    with ordinary_user(), pytest.raises(PermissionError):
        host.look(tmp_path / "file", write=False)


async def test_an_ordinary_user_reads_what_is_left_out(node: Node) -> None:
    node.directory.chmod(0o700)
    (node.root / "sys/fs/cgroup").chmod(0o700)
    node.context = replace(node.context, in_pod=False)
    before = await node.examined()
    # No root, no traceback, nothing is wrong that only cannot be seen.
    for path in (node.root.parent, node.root, node.root / "sys", node.root / "sys/fs"):
        path.chmod(0o755)
    (node.root.parent / "kubeconfig").chmod(0o644)
    with ordinary_user() as uid:
        node.context = replace(node.context, uid=uid)
        after = await node.examined()
    changed = {name: line.state for name, line in after.items() if line != before[name]}
    names = ["plugin directory", "kubelet.sock", "other plugins", "cgroups", "serving agent"]
    assert changed == dict.fromkeys(names, State.UNKNOWN)
    assert "sudo npu-agent doctor" in after["plugin directory"].remedy


# --- the agent's addresses


def with_metrics(context: Context, **values: Any) -> Context:
    metrics = replace(context.config.metrics, **values)
    return replace(context, config=replace(context.config, metrics=metrics))


async def of_agent(context: Context) -> dict[str, Check]:
    """The lines on a real agent, or on what has its addresses."""
    return {check.name: check for check in await run("", agent.lines(replace(context)))}


async def test_a_taken_port_matters_where_the_agent_wants_it(node: Node) -> None:
    node.pages.healthz = node.probes.healthz = "I am nginx"
    on_host = replace(node.context, in_pod=False)
    for context, expected in (
        (node.context, State.WRONG),
        (on_host, State.WRONG),  # the agent that serves the node has the name of this host
        (replace(on_host, hostname="other"), State.NOTE),
    ):
        lines = await of_agent(context)
        for key in ("metrics.listen", "metrics.probes"):
            assert lines[key].state is expected
            assert f"give {key} another one" in lines[key].remedy


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_without_an_answer_is_some_process(tls: bool) -> None:
    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    files = {"cert_file": "/none/tls.crt", "key_file": "/none/tls.key"} if tls else {}
    context = replace(POD, timing=CheckTiming(connection=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        metrics = {"listen": address, "probes": "127.0.0.1:0", "tls": TlsConfig(**files)}
        line = (await of_agent(with_metrics(context, **metrics)))["metrics.listen"]
        assert line.state is State.WRONG
        assert line.detail == f"{address} is taken, and does not answer within 0.3 s"
        assert "liveness probe" in line.remedy
    async with await asyncio.start_server(closes, "127.0.0.1", 0) as server:
        metrics["listen"] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        listening, _ = running.addresses(with_metrics(context, **metrics).config.metrics)
        assert await running.who(listening, 1.0) == running.Answer.SILENT


async def test_an_answer_without_end_is_no_agent() -> None:
    """Anything may listen there: its answer has a bound, and its words steer no terminal."""

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    async with serving(endless) as server:
        address, _ = running.addresses(MetricsConfig(listen=server.url.removeprefix("http://")))
        assert await running.status(address, 60.0) is None


async def test_a_report_steers_no_terminal_and_is_no_command_of_a_stranger(
    node: Node,
) -> None:
    told = {"subject": "\x1b[2J", "text": "a\x1b]0;b\x07\nc\u202e", "remedy": "\x1b[31m"}
    node.reports(problems=[told | {"command": "curl example.com | sh"}], notes=[told])
    for in_pod, hostname, command in (
        (True, "any", "curl example.com | sh"),
        (False, POD.hostname, "curl example.com | sh"),  # the lock says that its agent runs here
        (False, "other", node.context.agent_log),
    ):
        node.context = replace(node.context, in_pod=in_pod, hostname=hostname)
        every = [line for line in await examine(node.context) if line.name == "agent ?[2J"]
        assert [line.state for line in every] == [State.WRONG, State.NOTE]
        assert every[0].command == command
        assert {line.detail for line in every} == {"a?]0;b? c?"}
        assert "\x1b" not in every[0].remedy
    # A line that could steer a terminal is not shown at all.
    node.context = replace(node.context, in_pod=True)
    node.reports(problems=[told | {"command": "dmesg\x1b[2J"}], notes=[])
    assert (await node.examined())["agent ?[2J"].command == node.context.agent_log


def configured(tls: TlsFiles | None) -> TlsConfig:
    if tls is None:
        return TlsConfig()
    client_ca = str(tls.client_ca) if tls.client_ca else None
    return TlsConfig(cert_file=str(tls.cert), key_file=str(tls.key), client_ca_file=client_ca)


async def test_an_agent_is_known_by_tls_by_a_token_and_by_its_other_address(
    node: Node, tmp_path: Path
) -> None:
    ours = authority(tmp_path / "ca")
    probes = f"127.0.0.1:{node.probes.number}"
    node.reports(unready=["not registered"])
    for files, authorizer, detail in (
        (placed(tmp_path, ours.sign("server")), None, "an npu-agent answers on"),
        (None, Authorizer(Api()), "an npu-agent answers on"),
        (placed(tmp_path, ours.sign("server"), ours.ca), None, "takes clients with a certificate"),
    ):
        certificates, tls = Certificates(files) if files else None, configured(files)
        async with pages(Scene(), certificates=certificates, authorizer=authorizer) as (host, port):
            at = {"listen": f"{host}:{port}", "probes": probes, "tls": tls}
            lines = await of_agent(with_metrics(node.context, **at))
        assert lines["metrics.listen"].state is State.OK
        assert detail in lines["metrics.listen"].detail
    # Its /status.json asks for more than the doctor has: then /readyz has the reasons.
    assert (lines["readiness"].state, lines["readiness"].detail) == (State.WRONG, "not registered")


# --- the cluster


async def of_cluster(context: Context) -> dict[str, Check]:
    """The lines on the cluster, which is really asked."""
    return {check.name: check for check in await run("", cluster.lines(replace(context)))}


async def test_a_host_without_credentials_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for context, expected in ((HOST, State.UNKNOWN), (POD, State.WRONG)):
        lines = await of_cluster(context)
        assert lines["API server"].state is expected
        assert "KUBECONFIG" in lines["API server"].remedy
        assert "rights" not in lines


async def test_no_node_name_on_the_host_is_not_wrong(node: Node) -> None:
    node.context = replace(node.context, in_pod=False, node_name=None)
    line = (await node.examined())["NODE_NAME"]
    assert line.state is State.UNKNOWN
    assert "NODE_NAME=" in line.remedy


async def test_the_api_server_is_not_asked_where_the_config_needs_nothing(node: Node) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False, cordon=False)
    lines = await node.examined()
    assert not node.api.asked
    assert lines["API server"].state is State.UNUSED
    assert not {"rights", "NODE_NAME", "Node"} & lines.keys()


@pytest.mark.parametrize(
    "asking",
    [
        {"allocation": AllocationConfig(api="auto")},
        {"allocation": AllocationConfig(nodes=(NodeApi(node_name="n1", api="dra"),))},
        {"resources": (ResourceSpec(name="furiosa.ai/rngd", family="rngd", api="dra"),)},
    ],
)
async def test_where_only_dra_asks_for_the_cluster(node: Node, asking: dict[str, Any]) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False, cordon=False, **asking)
    lines = await node.examined()
    names = ("NODE_NAME", "API server", "rights", "Node", "DRA")
    assert {lines[name].state for name in names} == {State.OK}
    assert lines["rights"].detail == "all 7 that this configuration needs"


AS_NODE = "impersonate-on:associated-node:"


async def test_as_whom_the_agent_reads(bound: Node) -> None:
    async def line() -> tuple[State, str]:
        found = (await bound.examined())["API server"]
        return found.state, found.detail.partition("; reads as ")[2]

    assert await line() == (State.OK, "its account")
    bound.api.rights.add((f"{AS_NODE}get", "nodes"))
    assert await line() == (State.OK, "its Node (constrained impersonation)")


async def test_the_rights_of_one_that_reads_as_its_node(bound: Node) -> None:
    reads = {("get", "nodes"), ("watch", "nodes")}
    bound.api.rights ^= reads | {(f"{AS_NODE}{verb}", noun) for verb, noun in reads}
    assert (await bound.examined())["rights"].state is State.OK
    bound.api.rights.discard((f"{AS_NODE}watch", "nodes"))
    bound.api.rights.add(("watch", "nodes"))  # it is not what it reads by
    rights = (await bound.examined())["rights"]
    assert rights.detail == f"missing: nodes ({AS_NODE}watch)"


EVICTION = {(f"{AS_NODE}get", "pods"), (f"{AS_NODE}create", "pods")}
READS_AS_NODE = {(f"{AS_NODE}{verb}", "nodes") for verb in ("get", "watch")}


async def test_an_agent_that_evicts_needs_the_rights_of_the_component(bound: Node) -> None:
    bound.reconfigure(health=HealthConfig(evict=True))
    bound.api.rights |= READS_AS_NODE
    rights = (await bound.examined())["rights"]
    assert rights.detail == f"missing: pods ({AS_NODE}get), pods/eviction ({AS_NODE}create)"
    assert rights.remedy.count("add k8s/components/eviction (Helm: eviction)") == 1

    bound.api.rights |= EVICTION
    lines = await bound.examined()
    assert lines["rights"].detail == "all 7 that this configuration needs"
    assert lines["evictions"].state is State.OK


@pytest.mark.parametrize(("in_pod", "state"), [(True, State.NOTE), (False, State.UNKNOWN)])
async def test_an_agent_that_is_not_its_node_evicts_by_the_taint_only(
    in_pod: bool, state: State, node: Node
) -> None:
    assert "evictions" not in await node.examined()
    node.reconfigure(health=HealthConfig(evict=True))
    node.context = replace(node.context, in_pod=in_pod)
    lines = await node.examined()
    assert lines["rights"].state is State.OK
    assert lines["evictions"].state is state
    text = "only Pods that name a ResourceClaim, by the card's taint"
    assert (text in lines["evictions"].detail) is in_pod


# --- what hangs, and what is our own fault


async def test_a_check_that_hangs_delays_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ended, really = await node.examined(), threading.Event(), os.listdir

    def listdir(path: Path) -> list[str]:
        if str(path).endswith("bus/pci/devices"):
            ended.wait()
        return really(path)

    monkeypatch.setattr(os, "listdir", listdir)
    node.api.trouble = hangs
    # The request has to be on its way.
    timing = CheckTiming(read=0.5, request=3.0, connection=0.3)
    node.context = replace(node.context, timing=timing)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(node.directory / "silent.sock"))
        silent.listen()
        try:
            async with asyncio.timeout(30):
                after = await node.examined()
        finally:
            ended.set()
    changed = {name: line.state for name, line in after.items() if line != before[name]}
    assert changed == {"PCI": State.UNKNOWN, "API server": State.WRONG}
    assert before.keys() - after.keys() == {"rights", "Node"}
    assert "no answer within 0.5 s" in after["PCI"].detail
    assert "firewalls and NetworkPolicies on the way" in after["API server"].remedy


async def test_cards_that_are_not_read_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(host, "read_once", late)
    line = (await node.examined())["cards"]
    assert (line.state, line.remedy) == (State.UNKNOWN, "check dmesg: a driver may hang")


async def test_a_fault_of_ours_is_a_line() -> None:
    async def fails(_: Context) -> Check:
        raise RuntimeError("oh")

    async def lines(context: Context) -> Lines:
        yield "one", fails(context)
        yield "two", Check("", State.OK, "fine")
        raise RuntimeError("no more")

    found = await run("Section", lines(POD))
    assert [(each.name, each.state, each.section) for each in found] == [
        ("one", State.UNKNOWN, "Section"),
        ("two", State.OK, "Section"),
        ("Section", State.UNKNOWN, "Section"),
    ]
    assert found[0].detail == "internal error: RuntimeError('oh')"


def test_only_the_lock_says_which_agent_serves(tmp_path: Path) -> None:
    """It is asked for as a shared one: an exclusive one could keep an agent from taking over."""
    assert agent.owner_at(tmp_path) is None
    with locked(tmp_path, "other"):
        owner = agent.owner_at(tmp_path)
        assert owner is not None
        assert owner.host == "other"
        assert "npu-agent 0.1.0 on other, pid 1" in str(owner)
    with lock_path(tmp_path).open(encoding="utf-8") as another_doctor:
        fcntl.flock(another_doctor, fcntl.LOCK_SH)
        assert agent.owner_at(tmp_path) is None


async def test_an_agent_that_has_not_signed_its_lock_may_be_this_one(node: Node) -> None:
    lock_path(node.directory).write_text("", encoding="utf-8")
    line = (await node.examined())["serving agent"]
    assert (line.state, line.detail) == (State.OK, "an agent that has not signed its lock")


@pytest.mark.parametrize(
    ("uid", "error", "expected"),
    [
        (7, PermissionError(1, "Operation not permitted"), State.UNKNOWN),
        (0, PermissionError(13, "Permission denied"), State.WRONG),
        (7, TimeoutError(), State.WRONG),
    ],
)
async def test_a_kubelet_socket_that_is_refused_to_root_is_wrong_and_to_others_unknown(
    uid: int, error: OSError, expected: State, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: str) -> None:
        raise error

    monkeypatch.setattr(asyncio, "open_unix_connection", refused)
    node.context = replace(node.context, uid=uid)
    assert (await node.examined())["kubelet.sock"].state is expected


# --- the rest


async def test_cgroups_show_whether_pods_live(node: Node) -> None:
    cgroups = node.root / "sys/fs/cgroup"
    cgroups.rmdir()
    assert (await node.examined())["cgroups"].state is State.UNUSED
    shutil.rmtree(node.root / SIMULATION)
    line = (await node.examined())["cgroups"]
    assert line.state is State.WRONG
    assert line.detail == f"{cgroups} is missing"
    assert f"mount the host's /sys/fs/cgroup at {cgroups}" in line.remedy
