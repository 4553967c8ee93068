"""Reads as the Node that a Pod's token is bound to (KEP-5284), and by the account's own rights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from npu_agent.kube import (
    Api,
    ApiError,
    ErrorKind,
    credentials,
    dra,
    node,
    reviews,
)
from npu_agent.kube.request import Request
from npu_agent.people.simulator.apiserver import NODES, served
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import DEADLINE, jwt, says, status

DRIVER = "npu.furiosa.ai"
PROBE = "get n1"


@asynccontextmanager
async def connected(server: FaultyApiServer, bound: str | None = "n1") -> AsyncIterator[Api]:
    """A client with the token of a Pod on this Node."""
    async with (
        served(server.answer) as url,
        Api(lambda: credentials.at(url, "a Pod", node=bound), deadline=DEADLINE) as api,
    ):
        yield api


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (jwt({"kubernetes.io": {"node": {"name": "n1.example", "uid": "u"}}}), "n1.example"),
        (jwt({"kubernetes.io": {"pod": {"name": "p"}}}), None),
        (jwt({"kubernetes.io": {"node": {"name": "n1\r\nX: y"}}}), None),
        (jwt([]), None),
        ("opaque", None),
        ("a.!.c", None),
    ],
)
def test_the_node_that_a_token_is_bound_to(
    monkeypatch: pytest.MonkeyPatch, token: str, expected: str | None
) -> None:
    credentials.DIRECTORY.mkdir()
    (credentials.DIRECTORY / "token").write_text(token, encoding="utf-8")
    (credentials.DIRECTORY / "ca.crt").write_text("not read yet", encoding="utf-8")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert credentials.load().node == expected


async def refused(api: Api, namespace: str = "default", name: str = "gone") -> ApiError:
    with pytest.raises(ApiError) as caught:
        await dra.read_claim(api, namespace, name)
    return caught.value


async def test_reads_are_the_nodes_and_writes_the_accounts() -> None:
    server = FaultyApiServer("n1")
    server.readers = {"node"}
    server.allocate(DRIVER, "c", ["npu0"], pod="p")
    async with connected(server) as api:
        meta = await node.read(api, "n1")
        assert (await dra.read_claim(api, "default", "c"))["kind"] == "ResourceClaim"
        assert not (await dra.list_slices(api, "n1", DRIVER)).slices
        labelled = await node.apply_labels(api, meta, {"furiosa.ai/x": "y"})
        assert labelled.labels["furiosa.ai/x"] == "y"
        assert api.reads
        assert api.reads.as_node
    assert server.calls == [PROBE, PROBE, "get c", "list", "apply n1"], "one probe"


async def test_a_request_that_a_node_may_not_make_is_made_as_the_account() -> None:
    asked: list[str | None] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Impersonate-User"))
        return await says({"kind": "SelfSubjectAccessReview", "status": {"allowed": True}})(request)

    async with (
        served(reply) as url,
        Api(lambda: credentials.at(url, "a Pod", node="n1"), deadline=DEADLINE) as api,
    ):
        assert await reviews.allowed(api, "get", "nodes")
    assert asked == [None]
    assert api.reads is None


async def test_others_are_refused_and_a_claim_that_is_gone_is_unrelated() -> None:
    server = FaultyApiServer("n1")
    server.readers = {"node"}
    async with connected(server) as api:
        error = await refused(api)
        assert (error.kind, error.status) == (ErrorKind.UNRELATED, 403)
        assert error.remedy.startswith("it was deleted, or no Pod of this node uses it")
        for read in (node.read(api, "n2"), dra.list_slices(api, "n2", DRIVER)):
            with pytest.raises(ApiError, match="403"):
                await read
        assert api.reads
        assert api.reads.as_node


@pytest.mark.parametrize("bound", ["n1", None])
async def test_without_the_right_the_account_reads(
    bound: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = FaultyApiServer("n1")
    async with connected(server, bound) as api:
        for _ in range(2):
            assert (await node.read(api, "n1")).name == "n1"
        assert (await refused(api)).kind is ErrorKind.NOT_FOUND
    assert server.calls == [PROBE] * (3 if bound else 2) + ["get gone"]
    lines = [record.message for record in caplog.records if "own rights" in record.message]
    assert len(lines) == (1 if bound else 0), "one line says so"
    if bound:
        assert api.reads
        assert "cannot impersonate-on:associated-node:get" in api.reads.refusal
    else:
        assert api.reads is None, "a token of no Pod, or of Kubernetes before 1.30"


async def test_rights_that_are_taken_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    server = FaultyApiServer("n1")

    async def reads(api: Api, *readers: str) -> bool | None:
        """Whether as the Node; None: it is refused."""
        server.readers = set(readers)
        try:
            await node.read(api, "n1")
        except ApiError:
            return None
        assert api.reads
        return api.reads.as_node

    async with connected(server) as api:
        assert await reads(api, "node")
        assert [await reads(api) for _ in range(3)] == [None] * 3
        assert await reads(api, "node")
        # Another mode is applied while it runs: the read that finds it out is lost.
        assert [await reads(api, "account") for _ in range(2)] == [None, False]
        assert [await reads(api, "account", "node") for _ in range(2)] == [False, False]
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 2, "one each time"


async def test_an_api_server_that_fails_decides_nothing() -> None:
    server = FaultyApiServer("n1")
    server.trouble = status(503, "not yet")
    async with connected(server) as api:
        with pytest.raises(ApiError, match="503"):
            await node.read(api, "n1")
        server.trouble = None
        assert (await node.read(api, "n1")).name == "n1"
        assert api.reads
        assert not api.reads.as_node


async def test_a_node_that_is_not_there_may_be_read_as_such() -> None:
    server = FaultyApiServer("n1")
    server.readers = {"node"}
    del server.objects[NODES]["n1"]
    async with connected(server) as api:
        with pytest.raises(ApiError) as caught:
            await node.read(api, "n1")
        assert caught.value.kind is ErrorKind.NOT_FOUND
        assert api.reads
        assert api.reads.as_node


async def test_a_call_that_fails_closes_no_connection_under_one_that_has_just_begun() -> None:
    """A claim that met that was prepared a minute late."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    node_of_the_token = {"name": "n1", "uid": "u", "resourceVersion": "1"}

    async def answer(request: web.Request) -> web.Response:
        if request.method != "GET":
            await asyncio.Event().wait()
        whole = "Partial" not in request.headers["Accept"]
        if not whole:  # as whom it may read
            asked.set()
            await go_on.wait()
        kind = "Node" if whole else "PartialObjectMetadata"
        return web.json_response({"kind": kind, "apiVersion": "v1", "metadata": node_of_the_token})

    async with (
        served(answer) as url,
        Api(lambda: credentials.at(url, "a Pod", node="n1"), deadline=DEADLINE) as api,
    ):
        reading = asyncio.create_task(node.read_whole(api, "n1"))
        await asked.wait()
        event = Request("create", "Event", object, namespace="default", name="e", body={})
        with pytest.raises(ApiError) as caught:
            await api.ask(event, deadline=0.1)
        assert caught.value.kind is ErrorKind.TIMEOUT
        go_on.set()
        assert (await reading).metadata.name == "n1"
