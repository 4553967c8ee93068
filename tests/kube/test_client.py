"""The client against an API server that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from aiohttp import web

from npu_agent import __version__
from npu_agent.kube import (
    FIELD_MANAGER,
    USER_AGENT,
    Api,
    ApiError,
    Kind,
    NodeMeta,
    access,
    client,
    event,
    node,
    serviceaccount,
)
from tests.kube.helpers import (
    DEADLINE,
    NODE,
    Authority,
    Reply,
    Server,
    authority,
    drops,
    drops_amid,
    hangs,
    kubeconfig,
    says,
    serving,
    status,
)

META = NodeMeta("n1", "7b0c", "42", {"a": "b"}, frozenset())
EVENT = {"kind": "Event", "apiVersion": "v1", "metadata": {"name": "n1.17"}}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: Authority) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(serviceaccount, "DIRECTORY", tmp_path / "serviceaccount")
    # What this system trusts: reading its own 140 authorities takes OpenSSL most of a test.
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted.ca))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))


@pytest.fixture(scope="session")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("trusted"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("other"), "DNS:kubernetes.example")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(says(NODE)) as server:
        yield server


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[Api]:
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=DEADLINE)
    yield api
    await api.close()


async def trouble(api: Api, name: str = "n1") -> ApiError:
    """What `node` raises; its line is one line, and of bounded length."""
    with pytest.raises(ApiError) as caught:
        await node.read(api, name)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 1000
    return caught.value


def in_pod(
    monkeypatch: pytest.MonkeyPatch, server: Server, ca: Path, token: str | None = "first"
) -> Path:
    """Makes this a Pod of that API server; returns the token's file."""
    directory = serviceaccount.DIRECTORY
    directory.mkdir()
    (directory / "ca.crt").write_bytes(ca.read_bytes())
    if token is not None:
        (directory / "token").write_text(token)
    _, _, port = server.url.rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    return directory / "token"


# What is sent, and what is made of the answers


async def test_node_is_asked_for_from_the_cache_as_metadata_only(server: Server, api: Api) -> None:
    assert await node.read(api, "n1") == NodeMeta(
        "n1",
        "7b0c",
        "42",
        {"kubernetes.io/hostname": "n1", "npu.count": "2"},
        frozenset({"npu.count"}),
    )
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("GET", "/api/v1/nodes/n1")
    assert asked.query == [("resourceVersion", "0")]
    assert asked.headers["Accept"] == (
        "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    )
    assert asked.headers["User-Agent"] == USER_AGENT == f"npu-agent/{__version__}"
    assert asked.headers["Authorization"] == "Bearer secret"


async def test_labels_are_applied_to_this_very_node(server: Server, api: Api) -> None:
    after = await node.apply_labels(api, META, {"npu.count": "2"})
    assert after.resource_version == "42"
    assert after.applied == {"npu.count"}
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("PATCH", "/api/v1/nodes/n1")
    assert asked.query == [("fieldManager", "npu-agent"), ("force", "true")]
    assert FIELD_MANAGER == "npu-agent"
    assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
    assert asked.headers["Accept"] == (
        "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    )
    assert json.loads(asked.body) == {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "uid": "7b0c", "labels": {"npu.count": "2"}},
    }


async def test_no_labels_is_no_field_at_all(server: Server, api: Api) -> None:
    await node.apply_labels(api, META, {})
    assert json.loads(server.asked[0].body)["metadata"] == {"name": "n1", "uid": "7b0c"}


async def test_events(server: Server, api: Api) -> None:
    server.replies = [says(EVENT, 201)]
    unhealthy = {"metadata": {"generateName": "n1."}, "reason": "NPUUnhealthy"}
    assert await event.create(api, "default", unhealthy) == "n1.17"
    await event.patch(api, "default", "n1.17", {"count": 2})
    created, patched = server.asked
    assert (created.method, created.path) == ("POST", "/api/v1/namespaces/default/events")
    assert json.loads(created.body) == unhealthy
    assert created.headers["Content-Type"] == "application/json"
    assert (patched.method, patched.path) == (
        "PATCH",
        "/api/v1/namespaces/default/events/n1.17",
    )
    assert json.loads(patched.body) == {"count": 2}
    assert patched.headers["Content-Type"] == "application/merge-patch+json"


async def test_a_name_cannot_leave_its_place_in_the_path(server: Server, api: Api) -> None:
    await node.read(api, "a/b?c#d")
    assert server.asked[0].path == "/api/v1/nodes/a/b?c#d"
    assert server.asked[0].query == [("resourceVersion", "0")]


async def test_calls_share_a_connection(server: Server, api: Api) -> None:
    await asyncio.gather(*(node.read(api, "n1") for _ in range(5)))
    assert len({id(asked.connection) for asked in server.asked}) == 1


async def test_nothing_is_done_before_the_first_call() -> None:
    api = Api(kubeconfig=Path("/nonexistent"))
    await api.close()


async def test_after_close_it_connects_again(server: Server, api: Api) -> None:
    await node.read(api, "n1")
    await api.close()
    await api.close()
    await node.read(api, "n1")
    assert len(server.asked) == 2


async def test_what_takes_long_is_loaded_on_a_thread(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: dict[str, threading.Thread] = {}
    original = importlib.import_module

    def import_module(name: str) -> ModuleType:
        by[name] = threading.current_thread()
        return original(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    await node.read(api, "n1")
    assert set(by) == {"aiohttp"}
    assert by["aiohttp"].daemon


async def test_without_a_thread_it_fails_as_any_call_does(
    server: Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ApiError, match="no more threads"):
            await node.read(api, "n1")
    assert server.asked == []
    assert (await node.read(api, "n1")).name == "n1"


async def test_rights_are_asked_for(server: Server, api: Api) -> None:
    review = {"kind": "SelfSubjectAccessReview", "status": {"allowed": True}}
    server.replies = [says(review, 201), says({**review, "status": {"allowed": False}}, 201)]
    assert await access.allowed(api, "get", "nodes", name="n1")
    assert not await access.allowed(api, "create", "events", namespace="default")
    first, second = server.asked
    assert (first.method, first.path) == (
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    )
    right = json.loads(first.body)["spec"]["resourceAttributes"]
    assert right == {"verb": "get", "group": "", "resource": "nodes", "namespace": "", "name": "n1"}
    right = json.loads(second.body)["spec"]["resourceAttributes"]
    assert (right["namespace"], right["name"]) == ("default", "")


async def test_the_whole_node(server: Server, api: Api) -> None:
    server.replies = [says({"kind": "Node", "status": {"allocatable": {}}})]
    assert (await node.read_whole(api, "n1"))["status"] == {"allocatable": {}}
    (asked,) = server.asked
    assert asked.headers["Accept"] == "application/json"
    assert asked.query == [("resourceVersion", "0")]


# Answers that say no

RBAC = (
    'nodes "n1" is forbidden: User "system:serviceaccount:kube-system:npu-agent" cannot get '
    'resource "nodes" in API group "" at the cluster scope'
)
POLICY = "nodes \"n1\" is forbidden: ValidatingAdmissionPolicy 'own-node' denied request: not yours"


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        (400, "bad things", Kind.REFUSED, ["400 Bad Request (bad things)"]),
        (
            403,
            RBAC,
            Kind.FORBIDDEN,
            ["the service account kube-system/npu-agent has no right to get nodes", "doctor"],
        ),
        (403, 'User "bob" cannot get resource "nodes"', Kind.FORBIDDEN, ["the user bob has no"]),
        (403, POLICY, Kind.FORBIDDEN, ["own-node", "not RBAC's refusal"]),
        (404, 'nodes "n1" not found', Kind.NOT_FOUND, ["NODE_NAME may be wrong", "spec.nodeName"]),
        (409, "uid mismatch", Kind.CONFLICT, ["uid mismatch", "deleted or created again"]),
        (410, "gone", Kind.REFUSED, ["410 Gone"]),
        (422, POLICY, Kind.REFUSED, ["own-node", "admission policy"]),
        (429, "too many requests", Kind.TOO_MANY, ["429", "the agent retries"]),
        (500, "etcdserver: no leader", Kind.SERVER, ["500", "no leader"]),
        (503, "", Kind.SERVER, ["503 Service Unavailable:"]),
        (599, "what", Kind.SERVER, ["599"]),
        (304, "", Kind.GARBAGE, ["304"]),
    ],
)
async def test_statuses(
    server: Server, api: Api, code: int, message: str, kind: Kind, words: list[str]
) -> None:
    server.replies = [status(code, message)]
    error = await trouble(api)
    assert (error.kind, error.status, error.retry_after) == (kind, code, None)
    for word in ["cannot get Node n1", server.url, *words]:
        assert word in str(error)
    server.replies = [says(NODE)]
    assert (await node.read(api, "n1")).name == "n1"


async def test_what_is_forbidden_is_named(server: Server, api: Api) -> None:
    server.replies = [status(403, RBAC.replace("get", "patch"))]
    with pytest.raises(ApiError, match=r"apply labels to Node n1.*no right to patch nodes"):
        await node.apply_labels(api, META, {})
    server.replies = [status(403, 'User "u" cannot create resource "events"')]
    with pytest.raises(ApiError, match=r"in namespace default.*no right to create events"):
        await event.create(api, "default", {})
    server.replies = [status(404, "gone")]
    with pytest.raises(ApiError, match=r"cannot patch Event default/e: .*the Event has expired"):
        await event.patch(api, "default", "e", {})
    server.replies = [status(409, "AlreadyExists")]
    with pytest.raises(ApiError, match=r"an Event of this name exists"):
        await event.create(api, "default", {})


@pytest.mark.parametrize(
    ("header", "expected"), [("7", 7.0), ("Fri, 01 Jan 2100 00:00:00 GMT", 300.0), ("soon", None)]
)
async def test_retry_after(server: Server, api: Api, header: str, expected: float | None) -> None:
    for code in (429, 503):
        server.replies = [status(code, "later", Retry_After=header)]
        assert (await trouble(api)).retry_after == expected


# Answers that are none

HTML = "<html><head><title>x</title></head><body><h1>Bad\n Gateway</h1>" + "spam " * 1_000_000


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (says("{"), "no JSON, but '{'"),
        (says(""), "no JSON, but ''"),
        (says(b"\xff\x00\x1b[2J"), "no JSON"),
        (says("[" * 100_000), "no JSON"),
        (says("[]"), "list instead of PartialObjectMetadata"),
        (says("null"), "NoneType instead"),
        (says({**NODE, "kind": "Node"}), "Node instead of PartialObjectMetadata"),
        (says({**NODE, "kind": {"a": 1}}), "instead of PartialObjectMetadata"),
        (says({**NODE, "metadata": None}), "lacks name, uid or resourceVersion"),
        (says({**NODE, "metadata": {"name": "n1"}}), "lacks name, uid or resourceVersion"),
        (
            says({**NODE, "metadata": {**NODE["metadata"], "labels": {"a": 1}}}),
            "not an object of strings",
        ),
        (says({**NODE, "metadata": {**NODE["metadata"], "labels": []}}), "not an object of"),
        (says(HTML), "more than 2097152 bytes"),
    ],
)
async def test_garbage(server: Server, api: Api, reply: Reply, words: str) -> None:
    server.replies = [reply]
    error = await trouble(api)
    assert error.kind is Kind.GARBAGE
    assert words in str(error)
    server.replies = [says(NODE)]
    await node.read(api, "n1")


async def test_an_event_without_a_name_is_garbage(server: Server, api: Api) -> None:
    server.replies = [says({"kind": "Event"}, 201)]
    with pytest.raises(ApiError) as caught:
        await event.create(api, "default", {})
    assert caught.value.kind is Kind.GARBAGE


async def test_a_proxys_page_is_cut_short(server: Server, api: Api) -> None:
    server.replies = [says(HTML, 502)]
    error = await trouble(api)
    assert (error.kind, error.status) == (Kind.SERVER, 502)
    assert "502 Bad Gateway (Bad Gateway spam spam" in str(error)
    assert "<" not in str(error)


async def test_no_more_than_the_beginning_of_an_error_is_read(server: Server, api: Api) -> None:
    stopped = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 2**16)
        finally:
            stopped.set()

    server.replies = [endless]
    assert (await trouble(api)).kind is Kind.SERVER
    async with asyncio.timeout(DEADLINE):
        await stopped.wait()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_a_redirect_is_named_and_not_followed(server: Server, api: Api, code: int) -> None:
    async with serving(says(NODE)) as elsewhere:
        server.replies = [says("", code, {"Location": f"{elsewhere.url}/login?secret"})]
        error = await trouble(api)
        assert (error.kind, error.status) == (Kind.GARBAGE, code)
        host = elsewhere.url.removeprefix("http://")
        assert error.what.startswith(f"cannot get Node n1: {server.url} answered {code} ")
        assert error.what.endswith(f", a redirect to {host}")
        assert error.remedy == "is that a Kubernetes API server?"
        with pytest.raises(ApiError, match=f"a redirect to {host}"):
            await node.apply_labels(api, META, {})
        assert not elsewhere.asked


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("https://user:password@login.example/x", ", a redirect to login.example"),
        ("https://a\u202e.example/", ", a redirect to a?.example"),
        ("http://[::1", ", a redirect to a place that is no URL"),
        ("/elsewhere", "302 Found"),
    ],
)
async def test_where_a_redirect_leads(server: Server, api: Api, location: str, words: str) -> None:
    server.replies = [says("", 302, {"Location": location})]
    assert (await trouble(api)).what.endswith(words)


async def test_something_that_is_no_http(tmp_path: Path) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        api = Api(kubeconfig=kubeconfig(tmp_path, url), deadline=DEADLINE)
        error = await trouble(api)
        await api.close()
    assert error.kind is Kind.GARBAGE
    assert "does not speak HTTP" in str(error)


@pytest.mark.parametrize(
    ("failure", "tries"), [(OSError("no route"), 1), (aiohttp.ServerDisconnectedError(), 2)]
)
async def test_only_a_write_that_a_closing_connection_lost_is_sent_again(
    api: Api, monkeypatch: pytest.MonkeyPatch, failure: Exception, tries: int
) -> None:
    sent: list[str] = []

    async def fails(_session: object, _credentials: object, request: client.Request) -> None:
        sent.append(request.method)
        raise failure

    monkeypatch.setattr(client, "_send", fails)
    with pytest.raises(ApiError):
        await node.apply_labels(api, META, {"npu.count": "2"})
    assert sent == ["PATCH"] * tries
    with pytest.raises(ApiError):
        await node.read(api, "n1")  # aiohttp repeats these
    assert sent[tries:] == ["GET"]


# No answer


async def test_a_hang_ends_at_the_deadline(server: Server, tmp_path: Path) -> None:
    server.replies = [hangs]
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=0.5)
    error = await trouble(api)
    assert (error.kind, error.status) == (Kind.TIMEOUT, None)
    assert f"{server.url} has not answered within 0.5 s" in str(error)
    await api.close()


async def test_after_a_hang_the_kubeconfig_is_read_again(server: Server, tmp_path: Path) -> None:
    async with serving(hangs) as hanging:
        api = Api(kubeconfig=kubeconfig(tmp_path, hanging.url), deadline=0.5)
        assert (await trouble(api)).kind is Kind.TIMEOUT
        kubeconfig(tmp_path, server.url)
        api._deadline = DEADLINE
        assert (await node.read(api, "n1")).name == "n1"
        await api.close()


async def test_after_a_hang_credentials_that_are_gone_stay_in_use(
    server: Server, tmp_path: Path
) -> None:
    server.replies = [hangs, says(NODE)]
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=0.5)
    assert (await trouble(api)).kind is Kind.TIMEOUT
    (tmp_path / "kubeconfig").unlink()
    api._deadline = DEADLINE
    assert (await node.read(api, "n1")).name == "n1"
    await api.close()


async def test_waiting_for_another_call_counts_as_well(server: Server, tmp_path: Path) -> None:
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=0.2)
    async with asyncio.timeout(DEADLINE), api._calling:
        assert (await trouble(api)).kind is Kind.TIMEOUT
    assert not server.asked


async def test_a_body_that_never_ends_ends_at_the_deadline(server: Server, tmp_path: Path) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        return await hangs(request)

    server.replies = [half]
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=0.5)
    assert (await trouble(api)).kind is Kind.TIMEOUT
    await api.close()


async def test_a_call_can_be_cancelled(server: Server, api: Api) -> None:
    server.replies = [hangs]
    call = asyncio.create_task(node.read(api, "n1"))
    async with asyncio.timeout(DEADLINE):
        while not server.asked:
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    server.replies = [says(NODE)]
    assert (await node.read(api, "n1")).name == "n1"


async def test_close_is_quick_while_a_call_hangs(server: Server, api: Api) -> None:
    server.replies = [hangs]
    call = asyncio.create_task(trouble(api))
    async with asyncio.timeout(DEADLINE):
        while not server.asked:
            await asyncio.sleep(0.01)
        await api.close()
        assert (await call).kind is Kind.UNREACHABLE


async def test_connection_refused(tmp_path: Path) -> None:
    async with serving(says(NODE)) as server:
        pass
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert f"{server.url}: no connection" in str(error)
    assert "refused" in str(error)
    await api.close()


async def test_no_such_host(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "http://nobody.invalid:1")
    api = Api(kubeconfig=path, deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert "cannot be resolved" in str(error)
    await api.close()


@pytest.mark.parametrize("url", ["http://[1::2:3:", "ftp://127.0.0.1/", "nonsense"])
async def test_a_server_that_is_no_url(tmp_path: Path, url: str) -> None:
    api = Api(kubeconfig=kubeconfig(tmp_path, url), deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.CREDENTIALS
    assert str(tmp_path / "kubeconfig") in str(error)
    await api.close()


async def test_a_dropped_connection_is_tried_once_more(server: Server, api: Api) -> None:
    server.replies = [drops, says(NODE)]
    assert (await node.read(api, "n1")).name == "n1"
    server.replies = [drops, says(NODE)]
    assert (await node.apply_labels(api, META, {})).name == "n1"
    server.replies = [drops, says(EVENT)]
    await event.patch(api, "default", "e", {})
    server.replies = [drops, says(EVENT)]  # might be there twice
    with pytest.raises(ApiError) as caught:
        await event.create(api, "default", {})
    assert caught.value.kind is Kind.UNREACHABLE


async def test_one_that_is_dropped_each_time_is_reported(server: Server, api: Api) -> None:
    server.replies = [drops]
    assert (await trouble(api)).kind is Kind.UNREACHABLE
    assert len(server.asked) == 2
    with pytest.raises(ApiError, match="the connection broke"):
        await node.apply_labels(api, META, {})
    assert len(server.asked) == 4


async def test_one_that_is_dropped_amid_the_answer(server: Server, api: Api) -> None:
    server.replies = [drops_amid]
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert "the connection broke" in str(error)


# Credentials


async def test_in_a_pod(trusted: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        in_pod(monkeypatch, server, trusted.ca, "abc\n")  # client-go takes the line's end off too
        monkeypatch.setenv("KUBECONFIG", "/nonexistent")
        api = Api(deadline=DEADLINE)
        assert (await node.read(api, "n1")).name == "n1"
        await api.close()
    assert server.tokens == ["Bearer abc"]


async def test_a_given_kubeconfig_counts_more_than_the_pod(
    server: Server, api: Api, trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pod(monkeypatch, server, trusted.ca)
    await node.read(api, "n1")
    assert server.tokens == ["Bearer secret"]


@pytest.mark.parametrize("where", ["environment", "home"])
async def test_kubeconfig_of_the_environment_or_the_home(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = kubeconfig(tmp_path, server.url)
    if where == "environment":
        monkeypatch.setenv("KUBECONFIG", f"/nonexistent:{path}")
    else:
        (tmp_path / ".kube").mkdir()
        path.rename(tmp_path / ".kube" / "config")
    api = Api(deadline=DEADLINE)
    assert (await node.read(api, "n1")).name == "n1"
    await api.close()


@pytest.mark.parametrize("given", [True, False], ids=["its CA", "the system's CAs"])
async def test_kubeconfig_with_tls(trusted: Authority, tmp_path: Path, given: bool) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        cluster = {"certificate-authority": str(trusted.ca)} if given else {}
        path = kubeconfig(tmp_path, server.url, cluster=cluster)
        api = Api(kubeconfig=path, deadline=DEADLINE)
        assert (await node.read(api, "n1")).name == "n1"
        await api.close()


async def test_no_credentials_at_all(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.CREDENTIALS
    for words in (
        "cannot get Node n1: no credentials",
        str(serviceaccount.DIRECTORY / "token"),
        str(tmp_path / ".kube/config"),
        "k8s/daemonset.yaml",
        "KUBECONFIG",
        "labels.output: none",
    ):
        assert words in str(error)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
    assert (await node.read(api, "n1")).name == "n1"  # the next call tries again
    await api.close()


async def test_a_kubeconfig_that_takes_too_long_does_not_accuse_the_api_server(
    server: Server, tmp_path: Path
) -> None:
    """A named pipe without a writer, as a file on a mount that hangs."""
    os.mkfifo(tmp_path / "token")
    path = kubeconfig(tmp_path, server.url, user={"tokenFile": str(tmp_path / "token")})
    error = await trouble(Api(kubeconfig=path, deadline=1.0))
    (tmp_path / "token").open("w").close()  # and the thread ends
    assert error.kind is Kind.TIMEOUT
    words = "nothing was sent within 1 s, as the credentials are still being loaded"
    assert words in error.what
    assert "login program" in error.remedy
    assert server.asked == []


async def test_a_given_kubeconfig_that_is_missing(tmp_path: Path) -> None:
    error = await trouble(Api(kubeconfig=tmp_path / "nowhere", deadline=DEADLINE))
    assert error.kind is Kind.CREDENTIALS
    assert f"the kubeconfig {tmp_path / 'nowhere'} is missing" in str(error)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "token is empty"),
        ("\n \n", "token is empty"),
        ("abc\ndef", "more than one line"),
        ("abc\r\nX-Injected: yes", "more than one line"),
        ("abc\x00", "more than one line"),
        ("ключ", "cannot be read"),
    ],
)
async def test_a_bad_token(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch, token: str, words: str
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        path = in_pod(monkeypatch, server, trusted.ca, token)
        api = Api(deadline=DEADLINE)
        error = await trouble(api)
        assert error.kind is Kind.CREDENTIALS
        assert words in str(error)
        assert str(path) in str(error)
        assert not server.asked
        path.write_text("good")
        await node.read(api, "n1")
        await api.close()


async def test_a_missing_token(trusted: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        path = in_pod(monkeypatch, server, trusted.ca, token=None)
        api = Api(deadline=DEADLINE)
        error = await trouble(api)
        assert error.kind is Kind.CREDENTIALS
        assert str(path) in str(error)
        path.write_text("good")
        await node.read(api, "n1")
        await api.close()


@pytest.mark.parametrize("content", [None, b"", b"no PEM\n"])
async def test_a_bad_ca(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        ca = in_pod(monkeypatch, server, trusted.ca).with_name("ca.crt")
        if content is None:
            ca.unlink()
        else:
            ca.write_bytes(content)
        api = Api(deadline=DEADLINE)
        error = await trouble(api)
        assert error.kind is Kind.CREDENTIALS
        assert str(ca) in str(error)
        assert "kube-root-ca.crt" in str(error)
        ca.write_bytes(trusted.ca.read_bytes())
        await node.read(api, "n1")
        await api.close()


async def test_a_ca_that_has_not_signed_the_servers_certificate(
    trusted: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        ca = in_pod(monkeypatch, server, other.ca).with_name("ca.crt")
        api = Api(deadline=DEADLINE)
        error = await trouble(api)
        assert error.kind is Kind.CREDENTIALS
        assert f"{ca} has not signed it" in str(error)
        ca.write_bytes(trusted.ca.read_bytes())  # the CA was changed on disk
        await node.read(api, "n1")
        await api.close()


async def test_a_certificate_for_another_name(other: Authority, tmp_path: Path) -> None:
    async with serving(says(NODE), tls=other.context()) as server:
        cluster = {"certificate-authority": str(other.ca)}
        api = Api(kubeconfig=kubeconfig(tmp_path, server.url, cluster=cluster), deadline=DEADLINE)
        error = await trouble(api)
        assert error.kind is Kind.CREDENTIALS
        assert "tls-server-name" in str(error)
        cluster["tls-server-name"] = "kubernetes.example"
        kubeconfig(tmp_path, server.url, cluster=cluster)
        await node.read(api, "n1")
        await api.close()


async def test_tls_where_there_is_none(server: Server, tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, server.url.replace("http:", "https:"))
    api = Api(kubeconfig=path, deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert "https" in str(error)
    await api.close()


async def test_a_token_that_was_rotated(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        good = request.headers["Authorization"] == f"Bearer {path.read_text()}"
        return await (says(NODE) if good else status(401, "Unauthorized"))(request)

    async with serving(reply, tls=trusted.context()) as server:
        path = in_pod(monkeypatch, server, trusted.ca, "first")
        api = Api(deadline=DEADLINE)
        await node.read(api, "n1")
        path.write_text("second")
        await node.read(api, "n1")
        await node.read(api, "n1")
        await api.close()
    assert server.tokens == ["Bearer first", "Bearer first", "Bearer second", "Bearer second"]


async def test_the_token_is_read_again_before_it_expires(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        path = in_pod(monkeypatch, server, trusted.ca, "first")
        api = Api(deadline=DEADLINE)
        await node.read(api, "n1")
        path.write_text("second")
        monkeypatch.setattr(client, "_REREAD", 0.0)
        await node.read(api, "n1")
        path.unlink()  # for a moment: the one we have is still good
        await node.read(api, "n1")
        await api.close()
    assert server.tokens == ["Bearer first", "Bearer second", "Bearer second"]


async def test_a_token_that_is_no_good(server: Server, api: Api, tmp_path: Path) -> None:
    server.replies = [status(401, "Unauthorized")]
    for _ in range(2):
        error = await trouble(api)
        assert (error.kind, error.status) == (Kind.UNAUTHORIZED, 401)
        assert str(tmp_path / "kubeconfig") in str(error)
        assert "expired" in str(error)
    assert len(server.asked) == 4
    server.replies = [says(NODE)]
    await node.read(api, "n1")


async def test_credentials_that_are_gone_at_a_401(server: Server, api: Api, tmp_path: Path) -> None:
    await node.read(api, "n1")
    (tmp_path / "kubeconfig").unlink()
    server.replies = [status(401, "Unauthorized")]
    assert (await trouble(api)).kind is Kind.CREDENTIALS


async def test_a_login_program_runs_again_at_a_401(server: Server, tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text(
        "#!/bin/sh\necho x >> $0.runs\n"
        """printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", """
        """"status": {"token": "token-%s"}}' $(grep -c x $0.runs)\n"""
    )
    login.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    user = {"exec": {"apiVersion": version, "command": str(login)}}
    server.replies = [status(401, "Unauthorized"), says(NODE)]
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url, user=user), deadline=DEADLINE)
    await node.read(api, "n1")
    await api.close()
    assert server.tokens == ["Bearer token-1", "Bearer token-2"]


# The environment


async def test_netrc_is_not_read(server: Server, api: Api, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("default login a password b\n")
    await node.read(api, "n1")
    assert server.tokens == ["Bearer secret"]


async def test_a_proxy_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    api = Api(kubeconfig=kubeconfig(tmp_path, "http://10.96.0.1"), deadline=DEADLINE)
    assert (await node.read(api, "n1")).name == "n1"
    assert server.asked[0].headers["Host"] == "10.96.0.1"
    await api.close()


async def test_a_proxy_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says(NODE)) as server:
        pass
    monkeypatch.setenv("HTTPS_PROXY", server.url.replace("//", "//user:password@"))
    api = Api(kubeconfig=kubeconfig(tmp_path, "https://10.96.0.1"), deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert "NO_PROXY" in str(error)
    assert f"the proxy {server.url.removeprefix('http://')} does not" in str(error)
    await api.close()


@pytest.mark.parametrize("proxy", ["http://u:password@[1::2:3", "http://u:password@h:x", "/"])
async def test_a_proxy_that_is_no_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    api = Api(kubeconfig=kubeconfig(tmp_path, "https://10.96.0.1"), deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.CREDENTIALS
    assert "HTTPS_PROXY" in str(error)
    assert "password" not in str(error)
    await api.close()


async def test_a_proxy_that_refuses(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", server.url)  # which knows no CONNECT: 404
    api = Api(kubeconfig=kubeconfig(tmp_path, "https://10.96.0.1"), deadline=DEADLINE)
    error = await trouble(api)
    assert error.kind is Kind.UNREACHABLE
    assert "answered 404" in str(error)
    await api.close()
