"""Calls beside others, and watches: `Api.ask_apart`, `Api.watch`, and what is asked by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.kube import Api, ApiError, Kind, client, node, resourceclaims, resourceslices
from npu_agent.kube.client import Request
from npu_agent.kube.errors import Attempt
from tests.kube.helpers import (
    DEADLINE,
    NODE,
    Reply,
    Server,
    authority,
    drops,
    hangs,
    kubeconfig,
    says,
    serving,
    status,
)
from tests.until import until

CLAIM = {"kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "n", "uid": "u"}}
SPEC = {"pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}}
SLICE = {
    "kind": "ResourceSlice",
    "metadata": {"name": "s", "resourceVersion": "7"},
    "spec": SPEC,
}
WATCH = Request(
    attempt=Attempt(doing="watch", verb="watch", resource="resourceslices"),
    method="GET",
    path="/apis/x",
    kind="WatchEvent",
    query={"watch": "true"},
)
GONE = {"kind": "Status", "status": "Failure", "code": 410, "message": "too old"}


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("trusted")).ca


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca: Path) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(says(CLAIM)) as server:
        yield server


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[Api]:
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=DEADLINE)
    yield api
    await api.close()


class Gate:
    """Answers once it is opened; counts who waits."""

    def __init__(self, body: object) -> None:
        self.waiting = 0
        self.most = 0
        self.open = asyncio.Event()
        self._reply = says(body)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.open.wait()
        self.waiting -= 1
        return await self._reply(request)


# Beside others.


async def test_claims_are_got_eight_at_a_time(server: Server, api: Api) -> None:
    gate = Gate(CLAIM)
    server.replies = [gate]
    async with asyncio.TaskGroup() as calls:
        got = [calls.create_task(resourceclaims.get(api, "n", f"c{at}")) for at in range(11)]
        await until(lambda: gate.waiting == 8)
        gate.open.set()
    assert [each.result() for each in got] == [CLAIM] * 11
    assert gate.most == 8
    assert {asked.path for asked in server.asked} == {
        f"/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c{at}" for at in range(11)
    }


async def test_a_call_that_hangs_delays_no_other(server: Server, api: Api) -> None:
    server.replies = [hangs, hangs, says(CLAIM)]
    hanging = asyncio.create_task(node.read(api, "n1"))
    await until(lambda: len(server.asked) == 1)
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, "n", "c", deadline=0.05)
    assert caught.value.kind is Kind.TIMEOUT
    assert "within 0.05 s" in str(caught.value)
    assert await resourceclaims.get(api, "n", "c") == CLAIM
    assert not hanging.done()
    hanging.cancel()


async def test_waiting_for_a_place_counts_for_the_deadline(server: Server, api: Api) -> None:
    server.replies = [hangs]
    waiting = [asyncio.create_task(resourceclaims.get(api, "n", "c")) for _ in range(8)]
    await until(lambda: len(server.asked) == 8)
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, "n", "c", deadline=0.05)
    assert caught.value.kind is Kind.TIMEOUT
    for each in waiting:
        each.cancel()


async def test_calls_at_the_same_time_connect_once_and_all_learn_of_a_new_token(
    server: Server, api: Api, tmp_path: Path
) -> None:
    good = "secret"

    async def reply(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0)
        found = request.headers["Authorization"] == f"Bearer {good}"
        return await (says(CLAIM) if found else status(401, "Unauthorized"))(request)

    async def several() -> None:
        calls = (resourceclaims.get(api, "n", "c") for _ in range(8))
        assert await asyncio.gather(*calls) == [CLAIM] * 8

    server.replies = [reply]
    await several()
    good = "another"
    kubeconfig(tmp_path, server.url, user={"token": good})
    await several()
    await several()
    # Once the first has it, nobody comes with the old one any more.
    assert server.tokens[-8:] == ["Bearer another"] * 8


async def test_a_call_that_was_cut_short_for_new_credentials_is_repeated(
    server: Server, api: Api
) -> None:
    server.replies = [hangs, status(401, "Unauthorized"), says(CLAIM)]
    first = asyncio.create_task(resourceclaims.get(api, "n", "first"))
    await until(lambda: len(server.asked) == 1)
    assert await resourceclaims.get(api, "n", "second") == CLAIM
    assert await first == CLAIM


async def test_a_new_connection_is_not_closed_for_the_credentials_of_an_old_one(
    api: Api,
) -> None:
    old, _ = await api._connected()
    await api._renew(old)
    new, _ = await api._connected()
    await api._renew(old)
    assert (await api._connected())[0] is new is not old


async def test_an_api_server_that_is_away(api: Api, server: Server) -> None:
    server.replies = [drops]
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, "n", "c")
    assert caught.value.kind is Kind.UNREACHABLE
    server.replies = [says(CLAIM)]
    assert await resourceclaims.get(api, "n", "c") == CLAIM


# ResourceClaims.


async def test_a_claim_that_is_gone(server: Server, api: Api) -> None:
    server.replies = [status(404, 'resourceclaims "c" not found')]
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, "n", "c")
    assert caught.value.kind is Kind.NOT_FOUND
    assert "cannot get ResourceClaim n/c" in str(caught.value)
    assert str(caught.value).endswith("the claim was deleted")


async def test_no_right_to_claims_names_what_shows_the_command(server: Server, api: Api) -> None:
    server.replies = [status(403, 'User "bob" cannot get resource "resourceclaims"')]
    with pytest.raises(ApiError) as caught:
        await resourceclaims.get(api, "n", "c")
    assert "the user bob has no right to get resourceclaims" in str(caught.value)
    assert "`npu-agent doctor` shows the command" in str(caught.value)


async def test_whether_dra_is_served(server: Server, api: Api) -> None:
    server.replies = [says({"kind": "APIResourceList", "groupVersion": "resource.k8s.io/v1"})]
    assert await resourceclaims.served(api)
    assert server.asked[-1].path == "/apis/resource.k8s.io/v1"
    server.replies = [says("404 page not found", 404)]
    assert not await resourceclaims.served(api)
    server.replies = [status(503, "starting")]
    with pytest.raises(ApiError):
        await resourceclaims.served(api)


# ResourceSlices.


async def test_the_slices_of_a_driver_on_a_node(server: Server, api: Api) -> None:
    answer = {"kind": "ResourceSliceList", "metadata": {"resourceVersion": "42"}, "items": [SLICE]}
    server.replies = [says(answer)]
    found = await resourceslices.read(api, "n1", "npu.example.com")
    assert (dict(found.slices), found.resource_version) == ({"s": SLICE}, "42")
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("GET", "/apis/resource.k8s.io/v1/resourceslices")
    selector = "spec.nodeName=n1,spec.driver=npu.example.com"
    assert asked.query == [("fieldSelector", selector)]


@pytest.mark.parametrize("broken", [{"items": [{}]}, {"items": [5]}, {"metadata": {}}, {}])
async def test_a_list_that_is_none(server: Server, api: Api, broken: dict[str, Any]) -> None:
    server.replies = [says({"kind": "ResourceSliceList", **broken})]
    with pytest.raises(ApiError) as caught:
        await resourceslices.read(api, "n1", "d")
    assert caught.value.kind is Kind.GARBAGE


async def test_a_cluster_without_dra(server: Server, api: Api) -> None:
    server.replies = [says("404 page not found", 404)]
    with pytest.raises(ApiError) as caught:
        await resourceslices.read(api, "n1", "d")
    assert "Kubernetes 1.34" in str(caught.value)


async def test_a_slice_is_applied_on_the_server(server: Server, api: Api) -> None:
    server.replies = [says(SLICE)]
    assert await resourceslices.apply(api, SLICE) == SLICE
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("PATCH", "/apis/resource.k8s.io/v1/resourceslices/s")
    assert dict(asked.query) == {"fieldManager": "npu-agent", "force": "true"}
    assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
    assert json.loads(asked.body) == SLICE


async def test_a_slice_is_deleted_or_was_gone_already(server: Server, api: Api) -> None:
    server.replies = [says(SLICE), status(404, "not found"), status(403, "no")]
    assert await resourceslices.delete(api, "s")
    assert not await resourceslices.delete(api, "s")
    with pytest.raises(ApiError):
        await resourceslices.delete(api, "s")
    assert [asked.method for asked in server.asked] == ["DELETE"] * 3


# Watches.


def line(type_: str, thing: object) -> bytes:
    return json.dumps({"type": type_, "object": thing}).encode() + b"\n"


def streams(*chunks: bytes, then: Reply | None = None) -> Reply:
    """Sends the chunks one by one, and then ends, or goes on as another reply does."""

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.001)
        if then:
            await then(request)
        return response

    return reply


async def watched(api: Api, *, silence: float = DEADLINE) -> list[dict[str, Any]]:
    async with aclosing(api.watch(WATCH, silence=silence)) as events:
        return [event async for event in events]


async def failure(api: Api, *, silence: float = DEADLINE) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await watched(api, silence=silence)
    return caught.value


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_come_whole_however_they_are_sent(server: Server, api: Api, size: int) -> None:
    sent = line("ADDED", {"a": "é"}) + line("MODIFIED", {"a": 2}) + line("DELETED", {})
    server.replies = [streams(*(sent[at : at + size] for at in range(0, len(sent), size)))]
    assert await watched(api) == [
        {"type": "ADDED", "object": {"a": "é"}},
        {"type": "MODIFIED", "object": {"a": 2}},
        {"type": "DELETED", "object": {}},
    ]


async def test_an_event_is_there_before_the_next_one_is_sent(server: Server, api: Api) -> None:
    server.replies = [streams(line("ADDED", {}), then=hangs)]
    async with aclosing(api.watch(WATCH, silence=DEADLINE)) as events:
        assert await anext(events) == {"type": "ADDED", "object": {}}
        # And other calls are made meanwhile, on another connection.
        server.replies = [says(NODE)]
        assert (await node.read(api, "n1")).name == "n1"
    first, second = server.asked
    assert first.connection is not second.connection


@pytest.mark.parametrize("reply", [streams(line("ERROR", GONE)), status(410, "too old")])
async def test_a_version_that_is_too_old(server: Server, api: Api, reply: Reply) -> None:
    server.replies = [reply]
    error = await failure(api)
    assert error.status == 410
    assert "too old" in str(error)


async def test_silence_is_an_end(server: Server, api: Api) -> None:
    server.replies = [streams(line("ADDED", {}), then=hangs)]
    error = await failure(api, silence=0.05)
    assert error.kind is Kind.TIMEOUT


async def test_a_watch_goes_on_for_as_long_as_the_api_server_likes(
    server: Server, api: Api
) -> None:
    """It is no call that has to be answered in time."""

    async def pauses(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return web.Response()

    server.replies = [streams(line("ADDED", SLICE), then=pauses)]
    assert len(await watched(api)) == 1


async def test_no_answer_at_all_is_an_end(server: Server, tmp_path: Path) -> None:
    server.replies = [hangs]
    api = Api(kubeconfig=kubeconfig(tmp_path, server.url), deadline=0.2)
    assert (await failure(api)).kind is Kind.TIMEOUT
    await api.close()


async def test_a_connection_that_breaks(server: Server, api: Api) -> None:
    server.replies = [streams(line("ADDED", {}), then=drops)]
    assert (await failure(api)).kind is Kind.UNREACHABLE
    server.replies = [drops]
    assert (await failure(api)).kind is Kind.UNREACHABLE


NO_EVENTS = (b"\n", b"no JSON\n", b"5\n", b'{"type": "ADDED"}\n', b"[[" * 9_999 + b"\n")


@pytest.mark.parametrize("sent", NO_EVENTS)
async def test_what_is_no_event(server: Server, api: Api, sent: bytes) -> None:
    server.replies = [streams(sent)]
    error = await failure(api)
    assert error.kind is Kind.GARBAGE
    assert str(error).isprintable()


async def test_a_line_without_an_end_is_not_kept(
    server: Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LARGEST", 1000)
    server.replies = [streams(*[b" " * 300] * 4, then=hangs)]
    error = await failure(api)
    assert error.kind is Kind.GARBAGE
    assert "1000 bytes" in str(error)


async def test_a_watch_with_an_old_token_has_the_next_call_read_it_again(
    server: Server, api: Api, tmp_path: Path
) -> None:
    server.replies = [status(401, "Unauthorized"), streams(line("ADDED", {}))]
    assert (await failure(api)).kind is Kind.UNAUTHORIZED
    kubeconfig(tmp_path, server.url, user={"token": "another"})
    assert len(await watched(api)) == 1
    assert server.tokens == ["Bearer secret", "Bearer another"]


async def test_after_a_hang_a_new_token_is_used_and_no_watch_is_cut(
    server: Server, api: Api, tmp_path: Path
) -> None:
    asked_again = asyncio.Event()

    async def waits(_: web.Request) -> web.StreamResponse:
        await asked_again.wait()
        return web.Response()

    server.replies = [streams(line("ADDED", {}), then=waits), hangs, says(CLAIM)]
    async with aclosing(api.watch(WATCH, silence=DEADLINE)) as events:
        assert await anext(events) == {"type": "ADDED", "object": {}}
        with pytest.raises(ApiError) as caught:
            await resourceclaims.get(api, "n", "c", deadline=0.2)
        assert caught.value.kind is Kind.TIMEOUT
        kubeconfig(tmp_path, server.url, user={"token": "another"})
        assert await resourceclaims.get(api, "n", "c") == CLAIM
        asked_again.set()
        assert [event async for event in events] == []  # its own end, and no error
    assert server.tokens == ["Bearer secret", "Bearer secret", "Bearer another"]


async def test_no_credentials_for_a_watch(tmp_path: Path) -> None:
    api = Api(kubeconfig=tmp_path / "nowhere", deadline=DEADLINE)
    assert (await failure(api)).kind is Kind.CREDENTIALS


async def test_slices_are_watched_from_a_listing_on(server: Server, api: Api) -> None:
    server.replies = [streams(line("MODIFIED", SLICE))]
    async with aclosing(resourceslices.watch(api, "n1", "d", "42", seconds=55.4)) as events:
        assert [event async for event in events] == [{"type": "MODIFIED", "object": SLICE}]
    (asked,) = server.asked
    assert dict(asked.query) == {
        "fieldSelector": "spec.nodeName=n1,spec.driver=d",
        "watch": "true",
        "resourceVersion": "42",
        "timeoutSeconds": "55",
    }


@pytest.mark.parametrize(
    "sent",
    [
        line("ADDED", {}),
        line("ADDED", {"metadata": "s"}),
        line("ADDED", {**SLICE, "spec": {}}),
        line("ADDED", {**SLICE, "spec": {**SPEC, "devices": ["npu-0"]}}),
        line("BOOKMARK", SLICE),
    ],
)
async def test_an_event_that_is_of_no_slice(server: Server, api: Api, sent: bytes) -> None:
    server.replies = [streams(sent)]
    with pytest.raises(ApiError) as caught:
        async with aclosing(resourceslices.watch(api, "n1", "d", "1", seconds=60)) as events:
            await anext(events)
    assert caught.value.kind is Kind.GARBAGE
