"""What cannot be broken on a simulated node: mounts, users, hangs, and a host instead of a Pod."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from npu_agent import simulator
from npu_agent.config import (
    AllocationConfig,
    DisabledDevice,
    LabelsConfig,
    MetricsConfig,
    NodeApi,
    ResourceSpec,
    TlsConfig,
    default_config,
)
from npu_agent.core.hardware import SkippedDevice
from npu_agent.core.ledger import Assignment
from npu_agent.core.trouble import Trouble, TroubleKind
from npu_agent.doctor import cluster, host, kubelet, places, privileges, probe, serving, sockets
from npu_agent.doctor import situation as where
from npu_agent.doctor.check import Check, Lines, Unseen, Verdict
from npu_agent.doctor.examine import checks, examine
from npu_agent.doctor.probe import Directory, Process
from npu_agent.doctor.situation import Situation
from npu_agent.files import SIMULATION
from npu_agent.kube import Api
from npu_agent.kube.errors import ApiError, Attempt, Kind, answered
from npu_agent.kubelet.ownership import Owner, lock_path
from npu_agent.kubelet.podresources import socket_beside
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1 as wire
from npu_agent.outputs.labels import nfd
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.server import Server
from npu_agent.outputs.web.tls import Certificates, TlsFiles
from npu_agent.vendors import REGISTRY
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.doctor.helpers import RESOURCE, ApiServer, Node, locked
from tests.kube.helpers import hangs
from tests.kubelet.test_podresources import PodResources
from tests.outputs.deviceplugin.helpers import snapshot, state
from tests.outputs.web.certificates import authority, placed
from tests.outputs.web.helpers import Scene, listening

DIRECTORY = Directory(path=Path("/plugins"), owner="uid 0, gid 0, mode 0750")
POD = Situation(
    config=default_config(REGISTRY),
    host_root=Path("/host"),
    vendors=(Furiosa(Path("/host")),),
    node_name="n1",
    in_pod=True,
    uid=0,
    hostname="pod",
)
HOST = replace(POD, in_pod=False, host_root=Path("/"))
OWNER = Owner("pod", "npu-agent 0.1.0 on pod, pid 1")

Probe = Callable[[Situation], Awaitable[Any]]
Facts = Mapping[Any, object]
"""What probes see."""


@dataclass(frozen=True, kw_only=True)
class Made(Situation):
    """One whose probes see what a test says; all others are Unseen."""

    facts: Facts

    async def see(self, probe: Probe) -> Any:
        found = self.facts.get(probe, Unseen("no"))
        if isinstance(found, Exception):
            raise found
        return found


SEEN: Facts = {
    host.snapshot: snapshot(),
    sockets.plugin_directory: DIRECTORY,
    sockets.sockets: (),
    kubelet.owner: OWNER,
    kubelet.registered: {},
    kubelet.held: (),
}


async def told(
    lines: Callable[[Situation], Lines],
    situation: Situation = POD,
    facts: Facts = MappingProxyType({}),
) -> dict[str, Check]:
    """The lines of a subject."""
    values = {each.name: getattr(situation, each.name) for each in fields(situation) if each.init}
    found = await checks("subject", lines(Made(**values, facts={**SEEN, **facts})))
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


@pytest.fixture
def hung() -> Iterator[Callable[[], None]]:
    """What a dead card's driver does to whoever reads, until the test has ended."""
    ended = threading.Event()

    def hang() -> None:
        ended.wait()

    yield hang
    ended.set()


# --- directories


@pytest.mark.parametrize(
    ("found", "situation", "expected", "words"),
    [
        (
            replace(DIRECTORY, read_only=True, writable=False),
            POD,
            Verdict.WRONG,
            "without readOnly",
        ),
        (replace(DIRECTORY, writable=False), replace(POD, uid=7), Verdict.WRONG, "runAsUser: 0"),
        (replace(DIRECTORY, writable=False), replace(HOST, uid=7), Verdict.UNKNOWN, "sudo"),
        (Unseen("no", TroubleKind.DENIED), replace(HOST, uid=7), Verdict.UNKNOWN, "sudo"),
        (Unseen("no", TroubleKind.DENIED), replace(POD, uid=7), Verdict.WRONG, "runAsUser: 0"),
    ],
)
async def test_a_plugin_directory_that_is_not_to_be_written(
    found: Directory | Unseen, situation: Situation, expected: Verdict, words: str
) -> None:
    lines = await told(sockets.lines, situation, {sockets.plugin_directory: found})
    assert lines["plugin directory"].state is expected
    assert words in lines["plugin directory"].remedy


@pytest.mark.parametrize("name", ["CDI directory", "NFD directory"])
@pytest.mark.parametrize(
    "bad",
    [
        replace(DIRECTORY, read_only=True),
        replace(DIRECTORY, writable=False),
        replace(DIRECTORY, there=False),
    ],
)
async def test_a_directory_that_this_configuration_writes(
    name: str, bad: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        default_config(REGISTRY),
        allocation=AllocationConfig(method="cdi"),
        labels=LabelsConfig(output="nfd"),
    )
    nfd_is_bad = name.startswith("NFD")
    monkeypatch.setattr(
        places,
        "directory",
        lambda path: bad if path.name.startswith("features") is nfd_is_bad else DIRECTORY,
    )
    lines = await told(places.lines, replace(POD, config=config))
    assert {key: line.state for key, line in lines.items()} == {
        "CDI directory": Verdict.OK,
        "NFD directory": Verdict.OK,
        name: Verdict.WRONG,
    }
    assert "k8s/components/" in lines[name].remedy


def test_a_directory_as_it_is(tmp_path: Path) -> None:
    found = probe.directory(tmp_path)
    assert found.there
    assert found.writable
    assert not found.read_only
    (tmp_path / "file").touch()
    assert not probe.directory(tmp_path / "file").there
    assert not probe.directory(tmp_path / "file/below").there
    assert not probe.directory(tmp_path / "missing").there
    tmp_path.chmod(0o500)
    with ordinary_user(), pytest.raises(PermissionError):
        probe.directory(tmp_path / "file")


async def test_a_socket_path_that_is_too_long() -> None:
    long = replace(POD, config=replace(default_config(REGISTRY), plugin_dir="/" + "x" * 100))
    lines = await told(sockets.lines, long)
    assert lines["socket path"].state is Verdict.WRONG
    assert "shorten pluginDir or socketName by 20" in lines["socket path"].remedy


# --- who asks, and where


async def test_another_user_than_root() -> None:
    unwritable = replace(DIRECTORY, writable=False)
    for situation, directory, expected in (
        (POD, unwritable, Verdict.OK),
        (replace(POD, uid=7), unwritable, Verdict.WRONG),
        (replace(POD, uid=7), DIRECTORY, Verdict.OK),
        (replace(HOST, uid=7), unwritable, Verdict.UNKNOWN),
        (replace(HOST, uid=7), Unseen("no", TroubleKind.DENIED), Verdict.UNKNOWN),
    ):
        facts = {sockets.plugin_directory: directory}
        assert (await told(privileges.lines, situation, facts))["uid"].state is expected


async def test_an_ordinary_user_is_told_what_is_left_out(node: Node) -> None:
    node.directory.chmod(0o700)
    (node.root.parent / "pod-resources").chmod(0o700)
    node.situation = replace(node.situation, in_pod=False)
    before = await node.examined()
    # No root, no traceback, nothing called wrong that only cannot be seen.
    node.root.parent.chmod(0o755)
    (node.root.parent / "kubeconfig").chmod(0o644)
    with ordinary_user() as uid:
        node.situation = replace(node.situation, uid=uid)
        after = await node.examined()
    changed = {name: line.state for name, line in after.items() if line != before[name]}
    assert changed == dict.fromkeys(
        (
            "uid",
            "plugin directory",
            "kubelet.sock",
            "our sockets",
            "other plugins",
            "serving agent",
            "pod-resources",
            f"resource {RESOURCE}",
        ),
        Verdict.UNKNOWN,
    )
    assert "sudo npu-agent doctor" in after["plugin directory"].remedy


async def test_the_host_root_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: path == Path("/host/sys/class") or really(path)
    )
    inside = replace(POD, host_root=Path("/"))
    for situation, forgotten in ((inside, True), (POD, False), (HOST, False)):
        assert await host.root_forgotten(replace(situation)) is forgotten
        lines = await told(host.lines, situation, {host.root_forgotten: forgotten})
        assert ("host root" in lines) is forgotten
    lines = await told(host.lines, inside, {host.root_forgotten: True})
    assert lines["host root"].state is Verdict.WRONG
    assert "--host-root=/host" in lines["host root"].remedy


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Process | None, int], None]:
    """metrics.listen cannot be had: who has it, and the errno."""

    def makes(holder: Process | None, number: int = errno.EADDRINUSE) -> None:
        async def refuses(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(serving, "listen", refuses)
        monkeypatch.setattr(serving, "_listener", lambda *_: holder)

    return makes


AGENT = Process(1, ("/usr/bin/npu-agent", "run", "--host-root=/host"))
FOR_CLIENTS_WITH_A_CERTIFICATE = TlsConfig(
    cert_file="/none/tls.crt", key_file="/none/tls.key", client_ca_file="/none/ca.crt"
)


def at_both(answer: serving.Answer) -> Facts:
    """It is the one at metrics.listen and at metrics.probes."""
    return {serving.at_pages: answer, serving.at_probes: answer, serving.unready: None}


SOMEBODY = at_both(serving.Answer(somebody=True))
NOBODY = at_both(serving.Answer(somebody=False))


def with_metrics(situation: Situation, **values: Any) -> Situation:
    metrics = replace(situation.config.metrics, **values)
    return replace(situation, config=replace(situation.config, metrics=metrics))


def local(listening: socket.socket, *, tls: bool) -> serving.Listener:
    """What listens at this socket."""
    host, port = listening.getsockname()
    return serving.Listener(key="metrics.listen", host=host, port=port, shown="", tls=tls)


async def test_a_taken_port_matters_where_the_agent_wants_it(
    taken: Callable[[Process | None], None],
) -> None:
    taken(Process(7, ("nginx",)))
    for situation, owner, expected in (
        (POD, None, Verdict.WRONG),
        (HOST, None, Verdict.NOTE),
        (HOST, Owner("some-pod"), Verdict.NOTE),
        (HOST, Owner("pod"), Verdict.WRONG),
    ):
        lines = await told(serving.lines, situation, {**SOMEBODY, kubelet.owner: owner})
        for key in ("metrics.listen", "metrics.probes"):
            assert lines[key].state is expected
            assert "pid 7: nginx" in lines[key].detail
            assert f"give {key} another one" in lines[key].remedy


async def test_an_agent_that_is_stuck(taken: Callable[[Process | None], None]) -> None:
    taken(AGENT)
    for situation in (POD, with_metrics(POD, tls=FOR_CLIENTS_WITH_A_CERTIFICATE)):
        line = (await told(serving.lines, situation, SOMEBODY))["metrics.listen"]
        assert line.state is Verdict.WRONG
        assert "does not answer within 3 s" in line.detail
        assert "liveness probe" in line.remedy


async def test_an_address_that_nobody_holds_is_not_held(
    taken: Callable[[Process | None, int], None],
) -> None:
    """A refused connection is nobody's, whatever words Python has for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for tls in (False, True):
            assert await serving._get(local(free, tls=tls), "/healthz") == (None, "")
    taken(None, errno.EADDRNOTAVAIL)
    line = (await told(serving.lines, POD, NOBODY))["metrics.listen"]
    assert (line.state, line.detail) == (Verdict.WRONG, ":9100 cannot be had")


async def test_an_address_of_another_host_cannot_be_had() -> None:
    pages = serving.pages(with_metrics(POD, listen="192.0.2.1:9100"))
    assert "no such address" in await serving._taken(pages)


async def test_a_connection_that_is_not_answered_is_somebodys() -> None:
    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    async with server:
        for tls in (False, True):
            assert (await serving._get(local(server.sockets[0], tls=tls), "/healthz"))[0] == 0


async def test_port_0_is_always_free() -> None:
    config = replace(default_config(REGISTRY), metrics=MetricsConfig(listen=":0"))
    lines = {
        check.name: check for check in await checks("", serving.lines(replace(POD, config=config)))
    }
    assert lines["metrics.listen"].detail == ":0 is free here"
    assert lines["metrics.probes"].detail == ":0 is free here"


# --- TLS and tokens at metrics.listen


@asynccontextmanager
async def public(
    tls: TlsFiles | None = None, authorizer: Authorizer | None = None
) -> AsyncIterator[str]:
    """The agent's own server of its pages; its address."""
    certificates = Certificates(tls) if tls else None
    server = Server(
        "metrics",
        ("127.0.0.1", 0),
        Scene().pages(),
        certificates=certificates,
        authorizer=authorizer,
    )
    running = [asyncio.create_task(server.run())]
    if certificates:
        running.append(asyncio.create_task(certificates.run()))
    try:
        host, port = await listening(server)
        yield f"{host}:{port}"
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def configured(files: TlsFiles) -> TlsConfig:
    return TlsConfig(
        cert_file=str(files.cert),
        key_file=str(files.key),
        client_ca_file=str(files.client_ca) if files.client_ca else None,
    )


async def served(node: Node, **metrics: Any) -> dict[str, Check]:
    """The lines on metrics, of a real server of pages and of `node.port` for the probes."""
    metrics = {"probes": f"127.0.0.1:{node.port.number}", **metrics}
    found = await checks("", serving.lines(with_metrics(node.situation, **metrics)))
    return {check.name: check for check in found}


async def test_an_agent_with_tls_is_asked_by_tls(node: Node, tmp_path: Path) -> None:
    files = placed(tmp_path, authority(tmp_path / "ca").sign("server"))
    async with public(files) as address:
        lines = await served(node, listen=address, tls=configured(files))
    assert lines["metrics.listen"].detail == f"an npu-agent answers on {address}"
    assert {line.state for line in lines.values()} == {Verdict.OK}
    # Whatever answers at the port of the probes: this one is another program's.
    node.pages.words = "I am nginx"
    address = f"127.0.0.1:{node.pages.number}"
    lines = await served(node, listen=address, tls=configured(files))
    assert lines["metrics.listen"].state is Verdict.WRONG
    assert "it is held" in lines["metrics.listen"].detail
    assert lines["metrics.probes"].state is lines["readiness"].state is Verdict.OK


async def test_who_is_refused_without_a_certificate_looks_for_the_process(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = authority(tmp_path / "ca")
    files = placed(tmp_path, ours.sign("server"), ours.ca)
    in_pod = node.situation
    async with public(files) as address:
        for holder, situation, expected in (
            (AGENT, in_pod, Verdict.OK),
            (Process(7, ("nginx",)), in_pod, Verdict.WRONG),
            (None, in_pod, Verdict.WRONG),
            (None, replace(in_pod, in_pod=False, uid=7), Verdict.UNKNOWN),
        ):
            node.situation = situation
            monkeypatch.setattr(serving, "_listener", lambda *_, holder=holder: holder)
            lines = await served(node, listen=address, tls=configured(files))
            assert lines["metrics.listen"].state is expected
            assert lines["readiness"].state is Verdict.OK


async def test_an_agent_that_asks_for_tokens_is_known_by_its_refusal(node: Node) -> None:
    async with public(authorizer=Authorizer(Api())) as address:
        lines = await served(node, listen=address, authorization="kubernetes")
    assert {line.state for line in lines.values()} == {Verdict.OK}
    assert lines["metrics.listen"].detail == f"an npu-agent answers on {address}"


async def test_a_host_without_credentials_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for situation, expected in ((HOST, Verdict.UNKNOWN), (POD, Verdict.WRONG)):
        line = (await asked(situation))["API server"]
        assert line.state is expected
        assert "KUBECONFIG" in line.remedy
    # As soon as somebody points to one, it has to be there.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert (await asked(HOST))["API server"].state is Verdict.WRONG


async def test_a_kubeconfig_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("- x")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "bad"))
    line = (await asked(HOST))["API server"]
    assert line.state is Verdict.WRONG
    assert "set KUBECONFIG to another file" in line.remedy


async def asked(situation: Situation) -> dict[str, Check]:
    """The lines on the cluster, which is really asked."""
    found = await checks("cluster", cluster.lines(replace(situation)))
    return {check.name: check for check in found}


async def node_line(node: Mapping[str, Any] | ApiError) -> Check:
    """The line on the Node, as the API server answers for it."""
    answers = cluster.Answers(known_as="", allowed=None, node=node)
    return (await told(cluster.lines, POD, {cluster.answers: answers}))["Node"]


async def test_what_an_error_says_is_not_taken_for_its_remedy() -> None:
    """However long the words behind its last colon are, and however often a remedy has one."""
    get = Attempt(doing="get Node n1", verb="get", resource="nodes", server="https://a")
    garbage = "its answer: no object of the kind that was asked"
    bare = await node_line(get.failed(Kind.GARBAGE, garbage))
    assert bare.detail == "cannot get Node n1: its answer: no object of the kind that was asked"
    assert bare.remedy == ""
    status = b'{"kind": "Status", "message": "no"}'
    missing = await node_line(answered(get, 404, {}, status, None))
    assert missing.remedy.startswith("NODE_NAME may be wrong: it has to be the name that")
    assert missing.detail.endswith("answered 404 Not Found (no)")


async def test_no_node_name_on_the_host_is_not_wrong(node: Node) -> None:
    node.situation = replace(node.situation, in_pod=False, node_name=None)
    lines = await node.examined()
    assert lines["NODE_NAME"].state is Verdict.UNKNOWN
    assert "NODE_NAME=" in lines["NODE_NAME"].remedy


async def test_nothing_is_asked_where_nothing_is_wanted(node: Node) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False)
    lines = await node.examined()
    assert not node.api.asked
    unused = ("rights", "NODE_NAME", "API server", "Node", "labels")
    assert {lines[name].state for name in unused} == {Verdict.UNUSED}
    assert not [name for name in lines if name.startswith("allocatable")]


@pytest.mark.parametrize(
    "asking",
    [
        {"allocation": AllocationConfig(api="dra")},
        {"allocation": AllocationConfig(api="auto")},
        {"allocation": AllocationConfig(nodes=(NodeApi(node_name="n1", api="dra"),))},
        {"resources": (ResourceSpec(name="furiosa.ai/rngd", family="rngd", api="dra"),)},
    ],
)
async def test_where_only_dra_asks_for_the_cluster(node: Node, asking: dict[str, Any]) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False, **asking)
    lines = await node.examined()
    names = ("NODE_NAME", "API server", "rights", "Node", "DRA")
    assert {lines[name].state for name in names} == {Verdict.OK}
    assert lines["rights"].detail == "all 7 that this configuration needs"
    # What is wrong there is what to fix, and what DRA lacks follows from it.
    node.situation = replace(node.situation, node_name=None)
    lines = await node.examined()
    assert lines["NODE_NAME"].state is Verdict.WRONG
    node.situation = replace(node.situation, node_name="n1")
    node.api.rights.clear()
    lines = await node.examined()
    assert lines["rights"].state is Verdict.WRONG
    assert lines["DRA"].follows == "rights"
    node.api.refusal = 401
    lines = await node.examined()
    assert lines["API server"].state is Verdict.WRONG
    assert lines["DRA"].follows == "API server"


# --- what hangs, and what is our own fault


async def test_what_hangs_holds_up_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, hung: Callable[[], None]
) -> None:
    before = await node.examined()
    monkeypatch.setattr(probe, "DEADLINE", 0.5)
    monkeypatch.setattr(cluster, "DEADLINE", 3.0)  # the request has to be on its way
    monkeypatch.setattr(kubelet, "content", lambda *_: hung())  # the checkpoint
    monkeypatch.setattr(host, "_on_the_bus", lambda *_: hung())
    monkeypatch.setattr(ApiServer, "__call__", lambda _self, request: hangs(request))
    async with asyncio.timeout(30):
        after = await node.examined()
    changed = {name: line.state for name, line in after.items() if line != before[name]}
    assert changed == {
        "PCI": Verdict.UNKNOWN,
        f"resource {RESOURCE}": Verdict.UNKNOWN,
        "API server": Verdict.WRONG,
        **dict.fromkeys(
            (
                "rights",
                "Node",
                f"allocatable {RESOURCE}",
                "labels",
            ),
            Verdict.UNKNOWN,
        ),
    }
    assert "no answer within 0.5 s" in after["PCI"].detail
    assert "does a firewall or NetworkPolicy drop" in after["API server"].remedy


async def test_what_several_lines_need_is_seen_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    async def fetch(path: Path, _: Collection[str]) -> tuple[Assignment, ...]:
        asked.append(path)
        return ()

    monkeypatch.setattr(kubelet, "fetch", fetch)
    await node.examined()
    assert len(asked) == 1
    await node.examined()
    assert len(asked) == 2, "and each time anew"


async def test_a_probe_without_an_end_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    before = await node.examined()
    monkeypatch.setattr(where, "_LONGEST", 0.5)
    monkeypatch.setattr(serving, "_get", endless)
    after = await node.examined()
    changed = {name: line.detail for name, line in after.items() if line != before[name]}
    why = "no answer within 0.5 s"
    assert changed == {"metrics.listen": why, "metrics.probes": why}


async def test_a_socket_that_never_answers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and says nothing is no device plugin, and holds up nothing."""
    monkeypatch.setattr(sockets, "_ANSWER", 0.3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(node.directory / "odd.sock"))
        silent.listen()
        async with asyncio.timeout(30):
            lines = await node.examined()
    assert lines["other plugins"].state is Verdict.OK
    assert "odd.sock" not in lines["other plugins"].detail


@pytest.mark.parametrize(
    ("room", "function", "line"),
    [
        (host, "_on_the_bus", "PCI"),
        (host, "disabled_for", "card npu0"),
        (sockets, "_socket_path", "sockets"),
        (sockets, "_socket_names", "our sockets"),
        (places, "writable", "CDI directory"),
        (privileges, "content", "privileges"),
        (serving, "_get", "metrics.listen"),
        (cluster, "Api", "rights"),
    ],
)
async def test_a_fault_of_ours_is_a_line(
    room: object, function: str, line: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("oh")

    node.reconfigure(allocation=AllocationConfig(method="cdi"))
    monkeypatch.setattr(room, function, fails)
    after = {check.name: check for check in await examine(node.situation)}
    assert after[line].state is Verdict.UNKNOWN
    assert "internal error: RuntimeError('oh')" in after[line].detail
    assert after["plugin directory"].state is Verdict.OK
    assert after["NODE_NAME"].state is Verdict.OK


# --- who owns the resource


async def owned(
    registered: dict[str, list[str]],
    facts: Facts = MappingProxyType({}),
    *,
    unread: bool = False,
) -> Check:
    """The line on the resource of one Warboy."""
    odd = (SkippedDevice("/sys/x", "hangs", unread=True),) if unread else ()
    lines = await told(
        kubelet.lines,
        POD,
        {
            kubelet.registered: {name: frozenset(ids) for name, ids in registered.items()},
            host.snapshot: replace(snapshot(state()), skipped=odd),
            **facts,
        },
    )
    return lines[f"resource {RESOURCE}"]


async def test_ids_of_another_shape_are_of_another_plugin_or_configuration() -> None:
    line = await owned({RESOURCE: ["WARBOY-0_cores_0", "WARBOY-0_cores_1"]})
    assert line.state is Verdict.WRONG
    assert "this configuration does not offer" in line.detail
    assert "name its --config-file" in line.remedy


async def test_an_id_that_may_be_of_a_card_that_cannot_be_read() -> None:
    line = await owned({RESOURCE: ["X", "WARBOY-0"]}, unread=True)
    assert line.state is Verdict.UNKNOWN


async def test_a_candidate_is_named() -> None:
    rival = sockets.Socket(name="x.sock", ours=False, plugin=True, by=Process(7, ("/bin/plugin",)))
    line = await owned({RESOURCE: ["X"]}, {sockets.sockets: (rival,)})
    assert "its socket may be x.sock (pid 7: /bin/plugin)" in line.detail


async def test_nothing_registered_is_a_fault_only_while_an_agent_runs() -> None:
    assert (await owned({})).state is Verdict.WRONG
    assert (await owned({}, {kubelet.owner: None})).state is Verdict.NOTE


async def test_fewer_allocatable_may_be_for_a_card_that_cannot_be_read() -> None:
    node = {"status": {"allocatable": {RESOURCE: "2"}}}
    unread = (SkippedDevice("/sys/x", "hangs", unread=True),)
    for odd, expected in ((unread, Verdict.UNKNOWN), ((), Verdict.WRONG)):
        facts = {
            cluster.answers: cluster.Answers(known_as="", allowed=None, node=node),
            host.snapshot: replace(snapshot(state()), skipped=odd),
        }
        line = (await told(cluster.lines, POD, facts))[f"allocatable {RESOURCE}"]
        assert line.state is expected


async def test_a_device_that_is_kept_back_is_not_missed() -> None:
    """Somebody holds its cores under a resource of before."""
    old = Assignment("ns", "pod", "c", "furiosa.ai/warboy", "WARBOY-0")
    assert (await owned({}, {kubelet.held: (old,)})).state is Verdict.OK


async def test_a_card_that_a_claim_holds_is_not_missed(node: Node) -> None:
    """Where cards move to the device plugin, it lists this one once its claims have ended."""
    card = simulator.card("warboy", 0)
    await claimed(node, f"npu-{card.uuid.lower()}", "train", "eval")
    node.registered[RESOURCE].remove(card.uuid)
    node.write_checkpoint()
    node.api.node["status"]["allocatable"][RESOURCE] = "1"
    lines = await node.examined()
    assert not [line for line in lines.values() if line.state is Verdict.WRONG]
    assert lines["pod-resources"].detail == "answers: 1 of our devices are held by Pods"
    assert lines[f"resource {RESOURCE}"].detail == "the kubelet knows 1, all of them ours"
    allocatable = lines[f"allocatable {RESOURCE}"]
    assert allocatable.detail.endswith(
        "as many as are healthy here, besides 1 of cards that claims use"
    )
    # It excuses no other card.
    node.registered[RESOURCE].clear()
    node.write_checkpoint()
    node.api.node["status"]["allocatable"][RESOURCE] = "0"
    lines = await node.examined()
    assert "knows 0 of 1" in lines[f"resource {RESOURCE}"].detail
    assert lines[f"allocatable {RESOURCE}"].state is Verdict.WRONG


async def test_a_card_with_an_administrators_claim_may_be_offered(node: Node) -> None:
    """Such a claim holds nothing, and pod-resources does not say that it is one."""
    await claimed(node, f"npu-{simulator.card('warboy', 0).uuid.lower()}", "monitor")
    lines = await node.examined()
    assert not [line for line in lines.values() if line.state is Verdict.WRONG]
    node.api.node["status"]["allocatable"][RESOURCE] = "3"
    assert (await node.examined())[f"allocatable {RESOURCE}"].state is Verdict.WRONG


async def test_a_claim_on_a_card_that_has_gone(node: Node) -> None:
    await claimed(node, "npu-gone", "train")
    line = (await node.examined())["pod-resources"]
    assert line.state is Verdict.NOTE
    assert "Pod ml/train holds npu-gone" in line.detail


async def claimed(node: Node, device: str, *containers: str) -> None:
    """Has the kubelet list this device of a claim for the containers of a Pod."""
    resource = wire.ClaimResource(driver_name="npu.furiosa.ai", pool_name="n1", device_name=device)
    claim = wire.DynamicResource(
        claim_name="npus", claim_namespace="ml", claim_resources=[resource]
    )
    each = [wire.ContainerResources(name=one, dynamic_resources=[claim]) for one in containers]
    pod = wire.PodResources(name="train", namespace="ml", containers=each)
    path = socket_beside(node.directory)
    path.unlink()
    listed = bytes(wire.ListPodResourcesResponse(pod_resources=[pod]))
    node.plugins.append(UnixServer([PodResources(listed)], path))
    await node.plugins[-1].listen()


async def test_a_device_that_a_pod_holds_and_that_has_gone() -> None:
    held = (Assignment("ns", "job-1", "c", RESOURCE, "GONE"),)
    seen = snapshot(state())
    lines = await told(kubelet.lines, POD, {kubelet.held: held, host.snapshot: seen})
    line = lines["pod-resources"]
    assert line.state is Verdict.NOTE
    assert "Pod ns/job-1 holds GONE" in line.detail


async def test_a_device_that_a_pod_holds_may_be_of_a_card_that_cannot_be_read() -> None:
    held = (Assignment("ns", "job-1", "c", RESOURCE, "GONE"),)
    unread = replace(snapshot(state()), skipped=(SkippedDevice("/sys/x", "hangs", unread=True),))
    for seen in (unread, Unseen("no")):
        lines = await told(kubelet.lines, POD, {kubelet.held: held, host.snapshot: seen})
        assert lines["pod-resources"].detail == "answers: 1 of our devices are held by Pods"


async def test_an_agent_of_another_pod_stands_by_only_in_a_pod() -> None:
    facts = {kubelet.owner: Owner("another", "npu-agent 0.1.0 on another, pid 1")}
    for situation, expected in ((POD, Verdict.NOTE), (HOST, Verdict.OK)):
        lines = await told(kubelet.lines, situation, facts)
        assert lines["serving agent"].state is expected


def test_the_lock_is_asked_for_as_a_shared_one(tmp_path: Path) -> None:
    """An exclusive one, even for an instant, could keep an agent from taking over."""
    lock_path(tmp_path).touch()
    with lock_path(tmp_path).open() as another_doctor:
        fcntl.flock(another_doctor, fcntl.LOCK_SH)
        assert kubelet._owner_of(tmp_path) is None


@pytest.mark.parametrize("status", ["False", "Unknown", None])
async def test_only_true_is_ready(status: str | None) -> None:
    node = {"status": {"conditions": [{"type": "Ready", "status": status}]}}
    assert (await node_line(node)).state is Verdict.NOTE
    node["status"]["conditions"][0]["status"] = "True"
    assert (await node_line(node)).state is Verdict.OK


async def test_an_agent_that_has_not_signed_its_lock_is_nobody_elses(node: Node) -> None:
    """It may be the very agent of this Pod: nothing is said of one that stands by."""
    lock_path(node.directory).write_text("")
    line = (await node.examined())["serving agent"]
    assert line.state is Verdict.UNKNOWN
    assert "stands by" not in line.detail


async def test_a_kubelet_socket_that_is_refused_to_root_is_wrong_and_to_others_unknown() -> None:
    """By the kind of error, EPERM as well as EACCES, and not by its words."""
    for uid, words, kind, expected in (
        (7, "Operation not permitted", TroubleKind.DENIED, Verdict.UNKNOWN),
        (0, "Permission denied", TroubleKind.DENIED, Verdict.WRONG),
        (7, "the access was denied its turn", TroubleKind.TIMEOUT, Verdict.WRONG),
    ):
        dead = sockets.Socket(
            name="kubelet.sock", ours=False, trouble=Trouble(what=words, kind=kind)
        )
        lines = await told(sockets.lines, replace(POD, uid=uid), {sockets.sockets: (dead,)})
        assert lines["kubelet.sock"].state is expected


def test_an_agent_of_another_resource_is_no_rival(tmp_path: Path) -> None:
    """Only the lock says who serves; it is looked at without being taken."""
    assert kubelet._owner_of(tmp_path) is None
    with locked(tmp_path, "other"):
        owner = kubelet._owner_of(tmp_path)
        assert owner is not None
        assert owner.host == "other"
        assert "npu-agent 0.1.0 on other, pid 1" in str(owner)
    assert kubelet._owner_of(tmp_path) is None


# --- the rest


async def test_a_card_that_is_disabled(node: Node) -> None:
    node.reconfigure(disabled_devices=(DisabledDevice(dev_name="npu0"),))
    line = (await node.examined())["card npu0"]
    assert line.state is Verdict.NOTE
    assert "disabledDevices" in line.detail


async def test_labels_by_nfd(node: Node) -> None:
    file = node.root / nfd.FILE
    file.parent.mkdir(parents=True)
    labels = node.api.node["metadata"]["labels"]
    right = {key: value for key, value in labels.items() if "furiosa" in key}
    file.write_bytes(nfd.render(right) or b"")
    node.reconfigure(labels=LabelsConfig(output="nfd"))
    lines = await node.examined()
    assert {lines["labels"].state, lines["NFD directory"].state} == {Verdict.OK}
    file.write_bytes(nfd.render({**right, "beta.furiosa.ai/npu.old": "x"}) or b"")
    line = (await node.examined())["labels"]
    assert line.state is Verdict.WRONG
    assert "beta.furiosa.ai/npu.old should be gone" in line.detail


async def test_a_cdi_directory_that_the_agent_can_make(node: Node) -> None:
    node.reconfigure(allocation=AllocationConfig(method="cdi"))
    assert (await node.examined())["CDI directory"].state is Verdict.OK


async def test_a_healthy_node_without_cards(node: Node) -> None:
    """A normal state: nothing is wrong with it."""
    for card in ("npu0", "npu1"):
        simulator.apply_fault(node.root, card, "gone")
    node.registered.clear()
    node.write_checkpoint()
    node.api.node["status"]["allocatable"] = {}
    node.api.node["metadata"].update(labels={}, managedFields=[])
    lines = await node.examined()
    assert not [line for line in lines.values() if line.state is Verdict.WRONG]
    assert lines["cards"].state is Verdict.NOTE


async def test_cgroups_tell_who_lives(node: Node) -> None:
    cgroups = node.root / "sys/fs/cgroup"
    line = (await node.examined())["cgroups"]
    assert (line.state, line.detail) == (Verdict.OK, f"{cgroups} can be read")
    cgroups.rmdir()
    assert (await node.examined())["cgroups"].state is Verdict.UNUSED
    shutil.rmtree(node.root / SIMULATION)
    line = (await node.examined())["cgroups"]
    assert line.state is Verdict.WRONG
    assert f"{cgroups} is missing: the cards of a Pod that is deleted by force" in line.detail
    assert f"mount the host's /sys/fs/cgroup at {cgroups}" in line.remedy
    cgroups.mkdir()
    cgroups.chmod(0o700)
    for each in (cgroups.parent, cgroups.parent.parent, node.root, node.root.parent):
        each.chmod(0o755)
    with ordinary_user() as uid:
        node.situation = replace(node.situation, uid=uid)
        line = (await node.examined())["cgroups"]
    assert (line.state, "cannot be read by uid" in line.detail) == (Verdict.UNKNOWN, True)
