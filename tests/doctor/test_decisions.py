"""What cannot be broken on a simulated node: mounts, users, hangs, and a host instead of a Pod."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent import simulator
from npu_agent.commands.doctor import FURIOSA
from npu_agent.config import (
    AllocationConfig,
    DisabledDevice,
    LabelsConfig,
    MetricsConfig,
    default_config,
)
from npu_agent.core.hardware import Oddity
from npu_agent.core.ledger import Assignment
from npu_agent.core.trouble import Trouble, TroubleKind
from npu_agent.doctor import cluster, host, kubelet, places, privileges, probe, serving
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.examine import _filled
from npu_agent.doctor.probe import Directory, Process
from npu_agent.doctor.situation import Situation
from npu_agent.kube.errors import ApiError, Attempt, Kind, answered
from npu_agent.kubelet.ownership import Owner, lock_path
from npu_agent.outputs.labels import nfd
from npu_agent.vendors import WORDS
from tests.doctor.helpers import RESOURCE, ApiServer, Node, locked
from tests.kube.helpers import hangs
from tests.outputs.deviceplugin.helpers import snapshot, state

DIRECTORY = Directory(path=Path("/plugins"), owner="uid 0, gid 0, mode 0750")
POD = Situation(
    config=default_config(WORDS),
    host_root=Path("/host"),
    vendor=FURIOSA,
    node_name="n1",
    in_pod=True,
    uid=0,
    hostname="pod",
)
HOST = replace(POD, in_pod=False, host_root=Path("/"))
SEEN = kubelet.Kubelet(
    directory=DIRECTORY,
    sockets=(),
    owner=Owner("pod", "npu-agent 0.1.0 on pod, pid 1"),
    registered={},
    held=(),
)


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
        (replace(DIRECTORY, read_only=True, writable=False), POD, State.WRONG, "without readOnly"),
        (replace(DIRECTORY, writable=False), replace(POD, uid=7), State.WRONG, "runAsUser: 0"),
        (replace(DIRECTORY, writable=False), replace(HOST, uid=7), State.UNKNOWN, "sudo"),
        (Unseen("no", TroubleKind.DENIED), replace(HOST, uid=7), State.UNKNOWN, "sudo"),
        (Unseen("no", TroubleKind.DENIED), replace(POD, uid=7), State.WRONG, "runAsUser: 0"),
    ],
)
def test_a_plugin_directory_that_is_not_to_be_written(
    found: Directory | Unseen, situation: Situation, expected: State, words: str
) -> None:
    line = next(kubelet.checks(situation, replace(SEEN, directory=found), snapshot()))
    assert (line.name, line.state) == ("plugin directory", expected)
    assert words in line.remedy


@pytest.mark.parametrize("name", ["CDI directory", "NFD directory"])
@pytest.mark.parametrize(
    "bad",
    [
        replace(DIRECTORY, read_only=True),
        replace(DIRECTORY, writable=False),
        replace(DIRECTORY, there=False),
    ],
)
def test_a_directory_that_this_configuration_writes(name: str, bad: Directory) -> None:
    cdi, features = (bad if name.startswith(one) else DIRECTORY for one in ("CDI", "NFD"))
    lines = {
        line.name: line
        for line in places.checks(POD, places.Places(cdi=cdi, nfd=features, features=None))
    }
    assert {key: line.state for key, line in lines.items()} == {
        "CDI directory": State.OK,
        "NFD directory": State.OK,
        name: State.WRONG,
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


def test_a_socket_path_that_is_too_long() -> None:
    long = replace(POD, config=replace(default_config(WORDS), plugin_dir="/" + "x" * 100))
    lines = {line.name: line for line in kubelet.checks(long, SEEN, snapshot())}
    assert lines["socket path"].state is State.WRONG
    assert "shorten pluginDir or socketName by 20" in lines["socket path"].remedy


# --- who asks, and where


def test_another_user_than_root() -> None:
    unwritable = replace(DIRECTORY, writable=False)
    for situation, directory, expected in (
        (POD, unwritable, State.OK),
        (replace(POD, uid=7), unwritable, State.WRONG),
        (replace(POD, uid=7), DIRECTORY, State.OK),
        (replace(HOST, uid=7), unwritable, State.UNKNOWN),
        (replace(HOST, uid=7), Unseen("no", TroubleKind.DENIED), State.UNKNOWN),
    ):
        line = next(privileges.checks(situation, Unseen("no"), directory))
        assert (line.name, line.state) == ("uid", expected)


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
        State.UNKNOWN,
    )
    assert "sudo npu-agent doctor" in after["plugin directory"].remedy


def test_the_host_root_was_forgotten() -> None:
    blind = replace(_filled(host.Hardware, Unseen("no")), host_beside=True)
    lines = list(host.checks(replace(POD, host_root=Path("/")), blind))
    assert (lines[0].name, lines[0].state) == ("host root", State.WRONG)
    assert "--host-root=/host" in lines[0].remedy
    for good in (POD, HOST):
        assert "host root" not in {line.name for line in host.checks(good, blind)}


def test_a_taken_port_matters_where_the_agent_wants_it() -> None:
    taken = serving.Serving(remedy="take another", holder=Process(7, ("nginx",)))
    for situation, owner, expected in (
        (POD, None, State.WRONG),
        (HOST, None, State.NOTE),
        (HOST, Owner("some-pod"), State.NOTE),
        (HOST, Owner("pod"), State.WRONG),
    ):
        line = next(serving.checks(situation, taken, owner))
        assert line.state is expected
        assert "pid 7: nginx" in line.detail
        assert "take another" in line.remedy


def test_an_agent_that_is_stuck() -> None:
    stuck = serving.Serving(
        answers=True, holder=Process(1, ("/usr/bin/npu-agent", "run", "--host-root=/host"))
    )
    line = next(serving.checks(POD, stuck, None))
    assert line.state is State.WRONG
    assert "does not answer within 3 s" in line.detail
    assert "liveness probe" in line.remedy


async def test_an_address_that_nobody_holds_is_not_held() -> None:
    """A refused connection is nobody's, whatever words Python has for it."""
    config = replace(default_config(WORDS), metrics=MetricsConfig(listen="192.0.2.1:9100"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert await serving._get("127.0.0.1", free.getsockname()[1], "/healthz") == (None, "")
    line = next(serving.checks(POD, serving.Serving(remedy="no such address"), None))
    assert (line.state, line.detail) == (State.WRONG, ":9100 cannot be had")
    found = await serving.serving(replace(POD, config=config))
    assert isinstance(found, serving.Serving)
    assert not found.free


async def test_a_connection_that_is_not_answered_is_somebodys() -> None:
    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await serving._get("127.0.0.1", port, "/healthz"))[0] == 0


async def test_port_0_is_always_free() -> None:
    config = replace(default_config(WORDS), metrics=MetricsConfig(listen=":0"))
    found = await serving.serving(replace(POD, config=config))
    assert isinstance(found, serving.Serving)
    assert found.free


async def test_a_host_without_credentials_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for situation, expected in ((HOST, State.UNKNOWN), (POD, State.WRONG)):
        found = await cluster.cluster(situation)
        line = told(situation, found)["API server"]
        assert line.state is expected
        assert "KUBECONFIG" in line.remedy
    # As soon as somebody points to one, it has to be there.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert told(HOST, await cluster.cluster(HOST))["API server"].state is State.WRONG


async def test_a_kubeconfig_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("- x")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "bad"))
    line = told(HOST, await cluster.cluster(HOST))["API server"]
    assert line.state is State.WRONG
    assert line.remedy == "does kubectl work with it?"


def failed_with(error: ApiError) -> Check:
    found = replace(_filled(cluster.Cluster, Unseen("no")), node=error)
    return told(POD, found)["Node"]


def test_what_an_error_says_is_not_taken_for_its_remedy() -> None:
    """However long the words behind its last colon are, and however often a remedy has one."""
    get = Attempt(doing="get Node n1", verb="get", resource="nodes", server="https://a")
    bare = failed_with(get.failed(Kind.GARBAGE, "its answer: no object of the kind that was asked"))
    assert bare.detail == "cannot get Node n1: its answer: no object of the kind that was asked"
    assert bare.remedy == ""
    status = b'{"kind": "Status", "message": "no"}'
    missing = failed_with(answered(get, 404, {}, status, None))
    assert missing.remedy.startswith("NODE_NAME may be wrong: it has to be the name that")
    assert missing.detail.endswith("answered 404 Not Found (no)")


def told(situation: Situation, found: cluster.Cluster) -> dict[str, Check]:
    nowhere = _filled(places.Places, Unseen("no"))
    lines = cluster.checks(situation, found, SEEN, snapshot(), nowhere)
    return {line.name: line for line in lines}


async def test_no_node_name_on_the_host_is_not_wrong(node: Node) -> None:
    node.situation = replace(node.situation, in_pod=False, node_name=None)
    lines = await node.examined()
    assert lines["NODE_NAME"].state is State.UNKNOWN
    assert "NODE_NAME=" in lines["NODE_NAME"].remedy


async def test_nothing_is_asked_where_nothing_is_wanted(node: Node) -> None:
    node.reconfigure(labels=LabelsConfig(output="none"), events=False)
    lines = await node.examined()
    assert not node.api.asked
    assert {lines[name].state for name in ("NODE_NAME", "API server", "Node", "labels")} == {
        State.UNUSED
    }
    assert not [name for name in lines if name.startswith(("right to", "allocatable"))]


# --- what hangs, and what is our own fault


async def test_what_hangs_holds_up_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, hung: Callable[[], None]
) -> None:
    before = await node.examined()
    monkeypatch.setattr(probe, "DEADLINE", 0.5)
    monkeypatch.setattr(cluster, "DEADLINE", 0.5)
    monkeypatch.setattr(kubelet, "content", lambda *_: hung())  # the checkpoint
    monkeypatch.setattr(host, "_pci", lambda *_: hung())
    monkeypatch.setattr(ApiServer, "__call__", lambda _self, request: hangs(request))
    async with asyncio.timeout(30):
        after = await node.examined()
    changed = {name: line.state for name, line in after.items() if line != before[name]}
    assert changed == {
        "PCI": State.UNKNOWN,
        f"resource {RESOURCE}": State.UNKNOWN,
        "API server": State.WRONG,
        **dict.fromkeys(
            (
                "right to get nodes",
                "right to patch nodes",
                "right to create events",
                "right to patch events",
                "Node",
                f"allocatable {RESOURCE}",
                "labels",
            ),
            State.UNKNOWN,
        ),
    }
    assert "no answer within 0.5 s" in after["PCI"].detail
    assert "does a firewall or NetworkPolicy drop" in after["API server"].remedy


async def test_a_socket_that_never_answers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and says nothing is no device plugin, and holds up nothing."""
    monkeypatch.setattr(kubelet, "_ANSWER", 0.3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(node.directory / "odd.sock"))
        silent.listen()
        async with asyncio.timeout(30):
            lines = await node.examined()
    assert lines["other plugins"].state is State.OK
    assert "odd.sock" not in lines["other plugins"].detail


@pytest.mark.parametrize(
    ("room", "function", "lines"),
    [
        (host, "_drivers", {"driver warboy"}),
        (places, "checks", {"directories"}),
        (privileges, "privileges", {"privileges"}),
        (serving, "serving", {"metrics.listen"}),
        (cluster, "cluster", {"right to get nodes"}),
    ],
)
async def test_a_fault_of_ours_is_a_line(
    room: object, function: str, lines: set[str], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("oh")

    async def fails_later(*_: object) -> None:
        fails()

    later = function in ("privileges", "serving", "cluster")
    monkeypatch.setattr(room, function, fails_later if later else fails)
    after = await node.examined()
    for name in lines:
        assert after[name].state is State.UNKNOWN
    assert after["kubelet.sock"].state is State.OK


# --- who owns the resource


def owned(
    registered: dict[str, list[str]], seen: kubelet.Kubelet = SEEN, unread: bool = False
) -> Check:
    """The line on the resource of one Warboy."""
    one = state()
    odd = (Oddity("/sys/x", "hangs", unread=True),) if unread else ()
    known = {name: frozenset(ids) for name, ids in registered.items()}
    lines = kubelet.checks(POD, replace(seen, registered=known), replace(snapshot(one), odd=odd))
    return next(each for each in lines if each.name == f"resource {RESOURCE}")


def test_ids_of_another_shape_are_of_another_plugin_or_configuration() -> None:
    line = owned({RESOURCE: ["WARBOY-0_cores_0", "WARBOY-0_cores_1"]})
    assert line.state is State.WRONG
    assert "this configuration does not offer" in line.detail
    assert "name its --config-file" in line.remedy


def test_an_id_that_may_be_of_a_card_that_cannot_be_read() -> None:
    assert owned({RESOURCE: ["X", "WARBOY-0"]}, unread=True).state is State.UNKNOWN


def test_a_candidate_is_named() -> None:
    rival = kubelet.Socket(name="x.sock", ours=False, plugin=True, by=Process(7, ("/bin/plugin",)))
    line = owned({RESOURCE: ["X"]}, replace(SEEN, sockets=(rival,)))
    assert "its socket may be x.sock (pid 7: /bin/plugin)" in line.detail


def test_nothing_registered_is_a_fault_only_while_an_agent_runs() -> None:
    assert owned({}).state is State.WRONG
    assert owned({}, replace(SEEN, owner=None)).state is State.NOTE


def test_a_device_that_is_kept_back_is_not_missed() -> None:
    """Somebody holds its cores under a resource of before."""
    old = Assignment("ns", "pod", "c", "furiosa.ai/warboy", "WARBOY-0")
    assert owned({}, replace(SEEN, held=(old,))).state is State.OK


def test_a_device_that_a_pod_holds_and_that_has_gone() -> None:
    held = (Assignment("ns", "job-1", "c", RESOURCE, "GONE"),)
    lines = {x.name: x for x in kubelet.checks(POD, replace(SEEN, held=held), snapshot(state()))}
    assert lines["pod-resources"].state is State.NOTE
    assert "Pod ns/job-1 holds GONE" in lines["pod-resources"].detail


def test_the_lock_is_asked_for_as_a_shared_one(tmp_path: Path) -> None:
    """An exclusive one, even for an instant, could keep an agent from taking over."""
    lock_path(tmp_path).touch()
    with lock_path(tmp_path).open() as another_doctor:
        fcntl.flock(another_doctor, fcntl.LOCK_SH)
        assert kubelet._owner_of(tmp_path) is None


@pytest.mark.parametrize("status", ["False", "Unknown", None])
def test_only_true_is_ready(status: str | None) -> None:
    node = {"status": {"conditions": [{"type": "Ready", "status": status}]}}
    found = replace(_filled(cluster.Cluster, Unseen("no")), node=node)
    assert told(POD, found)["Node"].state is State.NOTE
    node["status"]["conditions"][0]["status"] = "True"
    assert told(POD, found)["Node"].state is State.OK


async def test_an_agent_that_has_not_signed_its_lock_is_nobody_elses(node: Node) -> None:
    """It may be the very agent of this Pod: nothing is said of one that stands by."""
    lock_path(node.directory).write_text("")
    line = (await node.examined())["serving agent"]
    assert line.state is State.UNKNOWN
    assert "stands by" not in line.detail


def test_a_kubelet_socket_that_is_refused_to_root_is_wrong_and_to_others_unknown() -> None:
    """By the kind of error, EPERM as well as EACCES, and not by its words."""
    for uid, words, kind, expected in (
        (7, "Operation not permitted", TroubleKind.DENIED, State.UNKNOWN),
        (0, "Permission denied", TroubleKind.DENIED, State.WRONG),
        (7, "the access was denied its turn", TroubleKind.TIMEOUT, State.WRONG),
    ):
        dead = kubelet.Socket(
            name="kubelet.sock", ours=False, trouble=Trouble(what=words, kind=kind)
        )
        lines = kubelet.checks(replace(POD, uid=uid), replace(SEEN, sockets=(dead,)), snapshot())
        assert next(x for x in lines if x.name == "kubelet.sock").state is expected


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
    assert line.state is State.NOTE
    assert "disabledDevices" in line.detail


async def test_labels_by_nfd(node: Node) -> None:
    file = node.root / nfd.FILE
    file.parent.mkdir(parents=True)
    labels = node.api.node["metadata"]["labels"]
    right = {key: value for key, value in labels.items() if "furiosa" in key}
    file.write_bytes(nfd.render(right) or b"")
    node.reconfigure(labels=LabelsConfig(output="nfd"))
    lines = await node.examined()
    assert {lines["labels"].state, lines["NFD directory"].state} == {State.OK}
    file.write_bytes(nfd.render({**right, "beta.furiosa.ai/npu.old": "x"}) or b"")
    line = (await node.examined())["labels"]
    assert line.state is State.WRONG
    assert "beta.furiosa.ai/npu.old should be gone" in line.detail


async def test_a_cdi_directory_that_the_agent_can_make(node: Node) -> None:
    node.reconfigure(allocation=AllocationConfig(method="cdi"))
    assert (await node.examined())["CDI directory"].state is State.OK


async def test_a_healthy_node_without_cards(node: Node) -> None:
    """A normal state: nothing is wrong with it."""
    for card in ("npu0", "npu1"):
        simulator.apply_fault(node.root, card, "gone")
    node.registered.clear()
    node.write_checkpoint()
    node.api.node["status"]["allocatable"] = {}
    node.api.node["metadata"].update(labels={}, managedFields=[])
    lines = await node.examined()
    assert not [line for line in lines.values() if line.state is State.WRONG]
    assert lines["cards"].state is State.NOTE
