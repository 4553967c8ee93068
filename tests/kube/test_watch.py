"""Watches: `Api.watch`, and that of ResourceSlices."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.kube import Api, ApiError, ErrorKind, dra, node
from npu_agent.kube.client import SILENCE, WatchEvent
from npu_agent.kube.request import Request
from tests.kube.helpers import (
    NODE,
    SLICE,
    Reply,
    Server,
    client,
    drops,
    hangs,
    kubeconfig,
    says,
    status,
)
from tests.processes import DEADLINE

CLAIM = {"kind": "ResourceClaim"}
WATCH = Request(verb="watch", kind="ResourceSlice", answer=dict)
GONE = {"kind": "Status", "status": "Failure", "code": 410, "message": "too old"}


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


async def watched(api: Api, **options: Any) -> list[WatchEvent]:
    async with api.watch(replace(WATCH, **options), "1", 60) as events:
        return [event async for event in events]


async def failure(api: Api, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await watched(api, **options)
    return caught.value


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_come_whole_however_they_are_sent(server: Server, api: Api, size: int) -> None:
    accented = {**SLICE, "a": "é"}
    sent = line("ADDED", accented) + line("MODIFIED", SLICE) + line("DELETED", SLICE)
    server.replies = [streams(*(sent[at : at + size] for at in range(0, len(sent), size)))]
    assert await watched(api) == [
        WatchEvent("ADDED", "7", accented),
        WatchEvent("MODIFIED", "7", SLICE),
        WatchEvent("DELETED", "7", SLICE),
    ]


async def test_an_event_is_there_before_the_next_one_is_sent(server: Server, api: Api) -> None:
    server.replies = [streams(line("ADDED", SLICE), then=hangs)]
    async with api.watch(WATCH, "1", 60) as events:
        assert (await anext(events)).type == "ADDED"
        # And other calls are made meanwhile, on another connection.
        server.replies = [says(NODE)]
        assert (await node.read(api, "n1")).name == "n1"


@pytest.mark.parametrize("reply", [streams(line("ERROR", GONE)), status(410, "too old")])
async def test_a_version_that_is_too_old(server: Server, api: Api, reply: Reply) -> None:
    server.replies = [reply]
    error = await failure(api)
    assert error.status == 410
    assert "too old" in str(error)


async def test_silence_is_an_end_and_a_pause_is_none(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pauses(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return web.Response()

    # Longer than a call may take.
    async with client(kubeconfig(tmp_path, server.url), 0.5) as api:
        server.replies = [streams(line("ADDED", SLICE), then=pauses)]
        assert len(await watched(api)) == 1
        server.replies = [hangs]
        assert (await failure(api)).kind is ErrorKind.TIMEOUT
        assert SILENCE <= 90, "a bookmark comes each minute"
        monkeypatch.setattr("npu_agent.kube.client.SILENCE", 0.05)
        server.replies = [streams(line("ADDED", SLICE), then=hangs)]
        assert (await failure(api)).kind is ErrorKind.TIMEOUT


VANISHES = """
import asyncio, os, socket, subprocess, sys
from npu_agent.kube import Api, ApiError, client
from npu_agent.kube.credentials import at
from npu_agent.people.simulator.apiserver import served
from tests.kube.test_watch import WATCH, streams
from tests.kube.helpers import hangs

for option, most, number in (
    ("KEEPIDLE", 25, 1), ("KEEPINTVL", 6, 1), ("KEEPCNT", 3, 2)
):
    option = (socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"))
    assert client.KEEP_ALIVE[option] <= most
    client.KEEP_ALIVE[option] = number

async def main():
    login = lambda: at(url, "test")
    async with served(streams(b"", then=hangs)) as url, Api(login, deadline=120) as api:
        try:
            async with api.watch(WATCH, "1", 60) as events:
                subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
                async for _ in events:
                    pass
        except ApiError as error:
            print(error.kind.name, flush=True)
            print(error, file=sys.stderr, flush=True)
            os._exit(0)

asyncio.run(main())
"""


def test_a_server_that_vanishes_without_a_word_is_noticed_by_the_kernel() -> None:
    """In a network of its own: its only interface goes down while a watch is open."""
    shell = 'ip link set lo up && exec "$0" -c "$1"'
    command = ["unshare", "--net", "--map-root-user", "sh", "-c", shell, sys.executable]
    if subprocess.run([*command, ""], capture_output=True, check=False).returncode:
        pytest.skip("no network of its own here")
    done = subprocess.run([*command, VANISHES], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.returncode) == ("UNREACHABLE\n", 0), done.stderr


async def test_a_connection_that_breaks(server: Server, api: Api) -> None:
    for reply in (streams(line("ADDED", SLICE), then=drops), drops):
        server.replies = [reply]
        assert (await failure(api)).kind is ErrorKind.UNREACHABLE


@pytest.mark.parametrize(
    "sent", [b"\n", b"no JSON\n", b"5\n", b'{"type": "ADDED"}\n', b"[[" * 9_999 + b"\n"]
)
async def test_lines_that_are_no_events(server: Server, api: Api, sent: bytes) -> None:
    server.replies = [streams(sent)]
    error = await failure(api)
    assert error.kind is ErrorKind.GARBAGE
    assert str(error).isprintable()


async def test_a_line_without_an_end_is_not_kept(server: Server, api: Api) -> None:
    server.replies = [streams(*[b" " * 300] * 4, then=hangs)]
    error = await failure(api, largest=1000)
    assert error.kind is ErrorKind.GARBAGE
    assert "1000 bytes" in str(error)


async def test_a_watch_with_an_old_token_has_the_next_call_read_it_again(
    server: Server, api: Api, tmp_path: Path
) -> None:
    server.replies = [status(401, "Unauthorized"), streams(line("ADDED", SLICE))]
    assert (await failure(api)).kind is ErrorKind.UNAUTHORIZED
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

    server.replies = [streams(line("ADDED", SLICE), then=waits), hangs, says(CLAIM)]
    async with api.watch(WATCH, "1", 60) as events:
        assert (await anext(events)).type == "ADDED"
        with pytest.raises(ApiError) as caught:
            await dra.read_claim(api, "n", "c", deadline=0.2)
        assert caught.value.kind is ErrorKind.TIMEOUT
        kubeconfig(tmp_path, server.url, user={"token": "another"})
        assert await dra.read_claim(api, "n", "c") == CLAIM
        asked_again.set()
        assert [event async for event in events] == []  # its own end, and no error
    assert server.tokens == ["Bearer secret", "Bearer secret", "Bearer another"]


# Of ResourceSlices.


async def test_slices_are_watched_from_a_listing_on(server: Server, api: Api) -> None:
    bookmark = {"metadata": {"resourceVersion": "99"}}
    server.replies = [streams(line("MODIFIED", SLICE), line("BOOKMARK", bookmark))]
    async with api.watch(dra.watch_slices("n1", "d"), "42", 355.4) as events:
        changed, mark = [event async for event in events]
    assert changed.object.metadata.name == SLICE["metadata"]["name"]
    assert changed[:2] == ("MODIFIED", SLICE["metadata"]["resourceVersion"])
    assert mark == ("BOOKMARK", "99", None)
    (asked,) = server.asked
    assert dict(asked.query) == {
        "fieldSelector": "spec.nodeName=n1,spec.driver=d",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "42",
        "timeoutSeconds": "355",
    }


@pytest.mark.parametrize(
    "sent",
    [
        line("ADDED", {**SLICE, "spec": {}}),
        line("BOOKMARK", {"metadata": {"resourceVersion": 7}}),
        line("ADDED", {**SLICE, "metadata": {"name": "s"}}),
        line("SOMETHING", SLICE),
    ],
)
async def test_an_event_that_is_of_no_slice(server: Server, api: Api, sent: bytes) -> None:
    server.replies = [streams(sent)]
    with pytest.raises(ApiError) as caught:
        async with api.watch(dra.watch_slices("n1", "d"), "1", 60) as events:
            await anext(events)
    assert caught.value.kind is ErrorKind.GARBAGE
