"""What a simulated node is not: other users, mounts, hangs, a host instead of a Pod."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from npu_agent import kube
from npu_agent.config import (
    AllocationConfig,
    DisabledDevice,
    LabelsConfig,
    NodeApi,
    ResourceSpec,
    TlsConfig,
    default_config,
)
from npu_agent.core.hardware import SkippedDevice
from npu_agent.core.ledger import Assignment
from npu_agent.core.trouble import Trouble, TroubleKind
from npu_agent.files import SIMULATION
from npu_agent.kube import Api
from npu_agent.kubelet.ownership import Owner, lock_path
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.report import Report, Served
from npu_agent.outputs.web.server import Server
from npu_agent.outputs.web.tls import Certificates, TlsFiles
from npu_agent.people import simulator
from npu_agent.people.doctor import agent, cluster, host, kubelet, sockets
from npu_agent.people.doctor.causes import CAUSES
from npu_agent.people.doctor.check import Check, Lines, State, Unknown
from npu_agent.people.doctor.context import Context, Timing
from npu_agent.people.doctor.directories import Directory, directory, writable
from npu_agent.people.doctor.examine import run
from npu_agent.typedjson import convert
from npu_agent.vendors import REGISTRY
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.kube.helpers import hangs
from tests.outputs.deviceplugin.helpers import snapshot, state
from tests.outputs.web.certificates import authority, placed
from tests.outputs.web.helpers import Scene, listening
from tests.people.doctor.helpers import RESOURCE, ApiServer, Node, locked

DIRECTORY = Directory(path=Path("/plugins"), owner="uid 0, gid 0, mode 0750")
POD = Context(
    config=default_config(REGISTRY),
    host_root=Path("/host"),
    vendors=(Furiosa(Path("/host")),),
    node_name="n1",
    in_pod=True,
    uid=0,
    hostname="pod",
)
HOST = replace(POD, in_pod=False, host_root=Path("/"))
UNREAD = (SkippedDevice("/sys/x", "hangs", unread=True),)

Facts = Mapping[Any, object]
"""What probes return, or raise."""
NO_FACTS: Facts = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Known(Context):
    """One whose probes return what a test says; all others raise Unknown."""

    facts: Facts

    async def probe(self, function: Any) -> Any:
        found = self.facts.get(function, Unknown("no"))
        if isinstance(found, Exception):
            raise found
        return found


async def report(
    lines: Callable[[Context], Lines], context: Context = POD, facts: Facts = NO_FACTS
) -> dict[str, Check]:
    """The lines of a subject."""
    every: Facts = {
        host.snapshot: snapshot(),
        sockets.plugin_directory: DIRECTORY,
        sockets.sockets: (),
        sockets.owner: Owner("pod", "0.1.0", 1),
        kubelet.registered: {},
        kubelet.held: (),
        **facts,
    }
    values = {each.name: getattr(context, each.name) for each in fields(context) if each.init}
    found = await run("subject", lines(Known(**values, facts=every)))
    return {check.name: check for check in found}


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
    ("found", "context", "line", "uid"),
    [
        (replace(DIRECTORY, read_only=True), POD, State.WRONG, State.OK),
        (replace(DIRECTORY, writable=False), replace(POD, uid=7), State.WRONG, State.WRONG),
        (replace(DIRECTORY, writable=False), replace(HOST, uid=7), State.UNKNOWN, State.UNKNOWN),
        (Unknown("no", TroubleKind.DENIED), replace(POD, uid=7), State.WRONG, State.WRONG),
        (Unknown("no", TroubleKind.DENIED), replace(HOST, uid=7), State.UNKNOWN, State.UNKNOWN),
        (DIRECTORY, replace(POD, uid=7), State.OK, State.OK),
    ],
)
async def test_a_plugin_directory_and_who_may_write_it(
    found: Directory | Unknown, context: Context, line: State, uid: State
) -> None:
    facts = {sockets.plugin_directory: found}
    check = (await report(sockets.lines, context, facts))["plugin directory"]
    assert check.state is line
    words = {State.OK: "", State.UNKNOWN: "sudo", State.WRONG: "without readOnly"}[line]
    assert words in check.remedy or "runAsUser: 0" in check.remedy
    assert (await report(sockets.user, context, facts))["uid"].state is uid


def test_a_directory_that_the_agent_writes(tmp_path: Path) -> None:
    for bad in (
        replace(DIRECTORY, read_only=True),
        replace(DIRECTORY, writable=False),
        replace(DIRECTORY, there=False),
    ):
        check = writable(POD, bad, "the remedy")
        assert (check.state, check.remedy, check.command) == (
            State.WRONG,
            "the remedy",
            "ls -ld /plugins",
        )
    found = directory(tmp_path)
    assert (found.there, found.writable, found.read_only) == (True, True, False)
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "missing"):
        assert not directory(tmp_path / name).there
    tmp_path.chmod(0o500)
    with ordinary_user(), pytest.raises(PermissionError):
        directory(tmp_path / "file")


async def test_an_ordinary_user_reads_what_is_left_out(node: Node) -> None:
    node.directory.chmod(0o700)
    (node.root.parent / "pod-resources").chmod(0o700)
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
    names = ["uid", "plugin directory", "kubelet.sock", "other plugins", "cgroups"]
    names += ["serving agent", "pod-resources", f"resource {RESOURCE}"]
    assert changed == dict.fromkeys(names, State.UNKNOWN)
    assert "sudo npu-agent doctor" in after["plugin directory"].remedy


async def test_the_host_root_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: path == Path("/host/sys/class") or really(path)
    )
    inside = replace(POD, host_root=Path("/"))
    for context, not_given in ((inside, True), (POD, False), (HOST, False)):
        assert await host.root_not_given(replace(context)) is not_given
    line = (await report(host.lines, inside, {host.root_not_given: True}))["host root"]
    assert line.state is State.WRONG
    assert "--host-root=/host" in line.remedy


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
    context = replace(POD, timing=Timing(connection=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        metrics = {"listen": address, "probes": "127.0.0.1:0", "tls": TlsConfig(**files)}
        line = (await of_agent(with_metrics(context, **metrics)))["metrics.listen"]
        assert line.state is State.WRONG
        assert line.detail == f"{address} is taken, and does not answer within 0.3 s"
        assert "liveness probe" in line.remedy
    at_pages = (await agent.answers(with_metrics(context, **metrics)))["metrics.listen"]
    assert at_pages == agent.Answer(taken=False)
    async with await asyncio.start_server(closes, "127.0.0.1", 0) as server:
        metrics["listen"] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        at_pages = (await agent.answers(with_metrics(context, **metrics)))["metrics.listen"]
        assert at_pages == agent.Answer(taken=True, silent=True)


async def test_port_0_is_always_free() -> None:
    lines = await of_agent(with_metrics(POD, listen=":0"))
    for key in ("metrics.listen", "metrics.probes"):
        assert lines[key].detail == ":0 is free here"


@asynccontextmanager
async def public(
    tls: TlsFiles | None = None, authorizer: Authorizer | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The agent's own server of its pages; the config for it."""
    certificates = Certificates(tls) if tls else None
    server = Server(
        "metrics",
        ("127.0.0.1", 0),
        Scene().pages(),
        certificates=certificates,
        authorizer=authorizer,
    )
    running = [asyncio.create_task(server.run())]
    config: dict[str, Any] = {}
    if tls and certificates:
        running.append(asyncio.create_task(certificates.run()))
        config["tls"] = TlsConfig(
            cert_file=str(tls.cert),
            key_file=str(tls.key),
            client_ca_file=str(tls.client_ca) if tls.client_ca else None,
        )
    try:
        host, port = await listening(server)
        yield config | {"listen": f"{host}:{port}"}
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_an_agent_is_known_by_tls_by_a_token_and_by_its_other_address(
    node: Node, tmp_path: Path
) -> None:
    ours = authority(tmp_path / "ca")
    probes = {"probes": f"127.0.0.1:{node.probes.number}"}
    node.reports(unready=["not registered"])
    for files, authorizer, detail in (
        (placed(tmp_path, ours.sign("server")), None, "an npu-agent answers on"),
        (None, Authorizer(Api()), "an npu-agent answers on"),
        (placed(tmp_path, ours.sign("server"), ours.ca), None, "takes clients with a certificate"),
    ):
        async with public(files, authorizer) as config:
            lines = await of_agent(with_metrics(node.context, **probes, **config))
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
        line = (await of_cluster(context))["API server"]
        assert line.state is expected
        assert "KUBECONFIG" in line.remedy
    # One that is named has to be there.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert (await of_cluster(HOST))["API server"].state is State.WRONG


async def test_no_node_name_on_the_host_is_not_wrong(node: Node) -> None:
    node.context = replace(node.context, in_pod=False, node_name=None)
    line = (await node.examined())["NODE_NAME"]
    assert line.state is State.UNKNOWN
    assert "NODE_NAME=" in line.remedy


async def test_nothing_is_asked_where_nothing_is_wanted(node: Node) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False, cordon=False)
    lines = await node.examined()
    assert not node.api.asked
    unused = ("rights", "NODE_NAME", "API server", "Node", "labels")
    assert {lines[name].state for name in unused} == {State.UNUSED}
    assert not [name for name in lines if name.startswith("allocatable")]


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
    # What is wrong there is what to fix, and what DRA lacks follows from it.
    node.context = replace(node.context, node_name=None)
    assert (await node.examined())["NODE_NAME"].state is State.WRONG
    node.context = replace(node.context, node_name="n1")
    node.api.rights.clear()
    assert (await node.examined())["DRA"].follows == "rights"
    node.api.refusal = 401
    assert (await node.examined())["DRA"].follows == "API server"


AS_NODE = "impersonate-on:associated-node:"


async def test_as_whom_the_agent_reads(bound: Node) -> None:
    async def line() -> tuple[State, str]:
        found = (await bound.examined())["reads as"]
        return found.state, found.detail.partition(":")[0]

    assert await line() == (State.OK, "its account, which RBAC cannot hold to its own Node")
    bound.api.rights.add((f"{AS_NODE}get", "nodes"))
    assert await line() == (State.OK, "its Node (constrained impersonation)")


async def test_by_a_kubeconfig_nothing_is_read_as_a_node(node: Node) -> None:
    node.api.rights |= {(f"{AS_NODE}{verb}", "nodes") for verb in ("get", "watch")}
    assert "reads as" not in await node.examined()


async def test_the_rights_of_one_that_reads_as_its_node(bound: Node) -> None:
    reads = {("get", "nodes"), ("watch", "nodes")}
    bound.api.rights ^= reads | {(f"{AS_NODE}{verb}", noun) for verb, noun in reads}
    assert (await bound.examined())["rights"].state is State.OK
    bound.api.rights.discard((f"{AS_NODE}watch", "nodes"))
    bound.api.rights.add(("watch", "nodes"))  # it is not what it reads by
    rights = (await bound.examined())["rights"]
    assert rights.detail == f"missing: nodes ({AS_NODE}watch)"


# --- what hangs, and what is our own fault


async def test_what_hangs_holds_up_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ended, really = await node.examined(), threading.Event(), os.listdir

    def listdir(path: Path) -> list[str]:
        if str(path).endswith("bus/pci/devices"):
            ended.wait()
        return really(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(ApiServer, "__call__", lambda _self, request: hangs(request))
    # The request has to be on its way.
    timing = Timing(read=0.5, request=3.0, connection=0.3)
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
    names = ("PCI", "rights", "Node", f"allocatable {RESOURCE}", "labels")
    assert changed == {**dict.fromkeys(names, State.UNKNOWN), "API server": State.WRONG}
    assert "no answer within 0.5 s" in after["PCI"].detail
    assert "firewalls and NetworkPolicies on the way" in after["API server"].remedy


async def test_a_probe_runs_once_and_for_so_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    async def fetch(path: Path, _: Collection[str]) -> tuple[Assignment, ...]:
        asked.append(path)
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr(kubelet, "fetch", fetch)
    node.context = replace(node.context, timing=replace(node.context.timing, longest=0.2))
    context = replace(node.context)
    found = await asyncio.gather(
        context.probe(kubelet.held), context.probe(kubelet.held), return_exceptions=True
    )
    assert [str(each) for each in found] == ["no answer within 0.2 s"] * 2
    assert len(asked) == 1
    assert (await node.examined())["pod-resources"].detail == "no answer within 0.2 s"
    assert len(asked) == 2, "and each report anew"


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


# --- the kubelet, and who has the resource


@pytest.mark.parametrize(
    ("registered", "facts", "expected", "words"),
    [
        (["WARBOY-0_cores_0"], {}, State.WRONG, "which this configuration does not offer"),
        (["X", "WARBOY-0"], {host.snapshot: UNREAD}, State.UNKNOWN, "a card that cannot be read"),
        (
            ["X"],
            {sockets.sockets: (sockets.Socket(name="x.sock", plugin=True),)},
            State.WRONG,
            "its socket may be x.sock",
        ),
        ([], {}, State.WRONG, "knows 0 of 1"),
        ([], {sockets.owner: None}, State.NOTE, "no agent serves them"),
        # As the agent reports it: the device waits for Pods that hold its cores.
        ([], {agent.report: 0}, State.OK, "no device to offer"),
    ],
)
async def test_the_devices_that_the_kubelet_knows(
    registered: list[str], facts: dict[Any, Any], expected: State, words: str
) -> None:
    odd = facts.pop(host.snapshot, ())
    if agent.report in facts:
        served = (Served(RESOURCE, facts[agent.report]),)
        facts = {agent.report: Report(cards=(), resources=served)}
    facts = {
        kubelet.registered: {RESOURCE: frozenset(registered)},
        host.snapshot: replace(snapshot(state()), skipped=odd),
        **facts,
    }
    line = (await report(kubelet.lines, POD, facts))[f"resource {RESOURCE}"]
    assert line.state is expected
    assert words in line.detail


async def test_two_cards_with_one_uuid_are_named() -> None:
    cards = [
        replace(one, card=replace(one.card, uuid="SAME"))
        for one in (state(index=0, id_="A"), state(index=1, id_="B"))
    ]
    line = (await report(host.lines, POD, {host.snapshot: snapshot(*cards)}))["UUIDs"]
    assert (line.state, line.detail) == (State.WRONG, "npu0, npu1 report one UUID: SAME")
    assert "UUIDs" in CAUSES["resource *"], "no second plugin is blamed for it"


async def test_fewer_allocatable_may_be_for_a_card_that_cannot_be_read() -> None:
    meta = {"name": "n1", "uid": "u", "resourceVersion": "1"}
    node = convert({"metadata": meta, "status": {"allocatable": {RESOURCE: "2"}}}, kube.Node)
    for odd, expected in ((UNREAD, State.UNKNOWN), ((), State.WRONG)):
        facts = {
            cluster.own_node: node,
            host.snapshot: replace(snapshot(state()), skipped=odd),
        }
        line = (await report(cluster.lines, POD, facts))[f"allocatable {RESOURCE}"]
        assert line.state is expected


async def test_devices_that_pods_hold_are_counted() -> None:
    held = [Assignment("ns", pod, "c", RESOURCE, "WARBOY-0") for pod in ("a", "b")]
    held.append(Assignment("ns", "c", "c", "npu.furiosa.ai", "npu-warboy-1", "claim"))
    held.append(Assignment("ns", "d", "c", "nvidia.com/gpu", "GPU-0"))
    line = (await report(kubelet.lines, POD, {kubelet.held: tuple(held)}))["pod-resources"]
    assert line.detail == "answers: 2 of our devices are held by Pods"


async def test_an_agent_of_another_pod_stands_by_only_in_a_pod() -> None:
    facts = {sockets.owner: Owner("another", "0.1.0", 1)}
    for context, expected in ((POD, State.NOTE), (HOST, State.OK)):
        assert (await report(kubelet.lines, context, facts))["serving agent"].state is expected


def test_only_the_lock_says_which_agent_serves(tmp_path: Path) -> None:
    """It is asked for as a shared one: an exclusive one could keep an agent from taking over."""
    assert sockets.owner_at(tmp_path) is None
    with locked(tmp_path, "other"):
        owner = sockets.owner_at(tmp_path)
        assert owner is not None
        assert owner.host == "other"
        assert "npu-agent 0.1.0 on other, pid 1" in str(owner)
    with lock_path(tmp_path).open() as another_doctor:
        fcntl.flock(another_doctor, fcntl.LOCK_SH)
        assert sockets.owner_at(tmp_path) is None


async def test_an_agent_that_has_not_signed_its_lock_may_be_this_one(node: Node) -> None:
    lock_path(node.directory).write_text("")
    line = (await node.examined())["serving agent"]
    assert line.state is State.UNKNOWN
    assert "stands by" not in line.detail


async def test_a_kubelet_socket_that_is_refused_to_root_is_wrong_and_to_others_unknown() -> None:
    """By the kind of error, EPERM as well as EACCES, and not by its words."""
    for uid, words, kind, expected in (
        (7, "Operation not permitted", TroubleKind.DENIED, State.UNKNOWN),
        (0, "Permission denied", TroubleKind.DENIED, State.WRONG),
        (7, "the access was denied its turn", TroubleKind.TIMEOUT, State.WRONG),
    ):
        trouble = Trouble(what=words, kind=kind)
        dead = sockets.Socket(name="kubelet.sock", trouble=trouble)
        lines = await report(sockets.lines, replace(POD, uid=uid), {sockets.sockets: (dead,)})
        assert lines["kubelet.sock"].state is expected


# --- the rest


async def test_a_card_that_is_disabled(node: Node) -> None:
    node.reconfigure(disabled_devices=(DisabledDevice(dev_name="npu0"),))
    line = (await node.examined())["card npu0"]
    assert line.state is State.NOTE
    assert "disabledDevices" in line.detail


async def test_a_cdi_directory_that_the_agent_can_make(node: Node) -> None:
    node.reconfigure(allocation=AllocationConfig(method="cdi"))
    assert (await node.examined())["CDI directory"].state is State.OK


async def test_a_healthy_node_without_cards(node: Node) -> None:
    """A normal state: nothing is wrong with it."""
    for card in ("npu0", "npu1"):
        simulator.apply_fault(node.root, card, "gone")
    node.registered.clear()
    node.write_checkpoint()
    node.reports(resources=[])
    node.api.node["status"]["allocatable"] = {}
    node.api.node["metadata"].update(labels={}, managedFields=[])
    lines = await node.examined()
    assert not [line for line in lines.values() if line.state is State.WRONG]
    assert lines["cards"].state is State.NOTE


async def test_cgroups_tell_who_lives(node: Node) -> None:
    cgroups = node.root / "sys/fs/cgroup"
    cgroups.rmdir()
    assert (await node.examined())["cgroups"].state is State.UNUSED
    shutil.rmtree(node.root / SIMULATION)
    line = (await node.examined())["cgroups"]
    assert line.state is State.WRONG
    assert f"{cgroups} is missing: the cards of a Pod that is deleted by force" in line.detail
    assert f"mount the host's /sys/fs/cgroup at {cgroups}" in line.remedy


@pytest.mark.parametrize("status", ["Unknown", "False"])
async def test_only_true_is_ready(node: Node, status: str) -> None:
    node.api.node["status"]["conditions"] = [{"type": "Ready", "status": status}]
    assert (await node.examined())["Node"].state is State.NOTE


async def test_what_the_agent_reports_of_itself(node: Node) -> None:
    card = simulator.card("rngd", 1)
    hot = {"subject": "card", "cards": [card.uuid], "text": "npu1 is hot", "remedy": "cool it"}
    gone = {"subject": "card", "text": "npu2 is gone", "remedy": "look"}
    why = f"{RESOURCE}: waiting"
    resource = {"subject": "dra", "text": "none", "unready": why, "remedy": "mount it"}
    node.reports(problems=[hot, gone, resource], unready=[why])
    lines = await node.examined()
    found = {
        name: (line.state, line.detail, line.remedy)
        for name, line in lines.items()
        if line.state is not State.OK and line.state is not State.UNUSED
    }
    assert found == {
        "card npu1": (State.NOTE, "npu1 is hot", "cool it"),
        "agent": (State.NOTE, "it reports: npu2 is gone", "look"),
        "readiness": (State.WRONG, f"{RESOURCE}: waiting", "mount it"),
    }
