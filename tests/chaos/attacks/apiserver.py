"""Attacks by the API server, by who stands between, and on the credentials for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.chaos.table import attack
from tests.chaos.world import World, replaced
from tests.kube.helpers import drops, drops_amid, hangs, says, serving
from tests.kube.helpers import status as refuses

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def trouble(here: World, reply: Reply) -> AsyncIterator[None]:
    """The API server answers so to a new agent, which has waited for nothing yet."""
    node = here.agent.node
    node.trouble = reply
    try:
        asked = len(node.calls)
        async with here.registers():
            await here.start_again()
        await here.until(lambda: len(node.calls) > asked, "a request")
        await here.pod()
        yield
    finally:
        node.trouble = None


async def withstands(here: World, *replies: Reply, seconds: float = 0.0) -> None:
    """The API server answers so one after the other, for so long each; then it is well."""
    for reply in replies:
        async with trouble(here, reply):
            await asyncio.sleep(seconds)
    await labels_again(here)


async def labels_again(here: World) -> None:
    """Waits until its labels are back, which it puts there when something about them changes."""
    node = here.agent.node
    node.lose_labels()
    here.configure("labels: {sets: [alpha, beta]}")
    await here.until(lambda: bool(node.labels), "the labels to be back")


@attack(short=True)
async def api_server_refuses(here: World) -> None:
    """The API server answers 400, 401, 403, 404, 409, 410, 422, 429, 500, 503 and 599.

    Pods get NPUs all the while; labels are back when it is well.
    """
    codes = (400, 401, 403, 404, 409, 410, 422, 429, 500, 503, 599)
    await withstands(here, *(refuses(code, "attack \x1b[2J" * 100) for code in codes))


@attack()
async def api_server_answers_nonsense(here: World) -> None:
    """It answers with noise, a number, a list, null, half an object, 32 MiB, and ends amid.

    Pods get NPUs all the while; labels are back when it is well.
    """
    await withstands(
        here,
        says(b"\x00\xff{[" * 100), says(b"1"), says(b"[]"), says(b"null"), says(b'{"metadata":'),
        says(b'{"metadata": {"labels": 7, "managedFields": {}}}'), says(b"[" * 100_000),
        says(b" " * (32 << 20)), says(b""), drops, drops_amid,
        says(b"{}", content_type="text/html"), says(b'{"kind": 1e999, "metadata": null}'),
    )  # fmt: skip


@attack(short=True)
async def api_server_hangs(here: World) -> None:
    """It never answers.

    Pods get NPUs all the while, and SIGTERM ends the agent.
    """
    async with trouble(here, hangs):
        await here.ends()
    await here.start_again()


@attack()
async def api_server_drips(here: World) -> None:
    """It answers with a byte a second, without end.

    Pods get NPUs all the while; labels are back when it is well.
    """

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(1)

    await withstands(here, drip, seconds=5)


@attack(short=True)
async def api_server_sends_elsewhere(here: World) -> None:
    """It redirects every request (301, 302, 307, 308) to another server.

    The other server is never given the token.
    """
    async with serving(says(b"{}")) as other:
        to = {"Location": f"{other.url}/stolen"}
        codes = (301, 302, 307, 308)
        await withstands(here, *(says(b"", code, to) for code in codes), seconds=1)
        assert not any(other.tokens), other.tokens


@attack()
async def api_server_says_when_to_come_back(here: World) -> None:
    """It answers 429 and 503 with Retry-After: -1, 10^18, noise.

    Labels are back when it is well, and no more than 50 requests are made meanwhile.
    """
    before = len(here.agent.node.calls)
    for after in ("1" + "0" * 18, "1e9", "soon", "", "-1"):
        async with trouble(here, refuses(429, "attack", Retry_After=after)):
            await asyncio.sleep(1)
    made = len(here.agent.node.calls) - before
    await labels_again(here)
    assert made < 50, f"{made} requests"


@attack()
async def token_that_is_none(here: World) -> None:
    """The token's file is a pipe, a folder, missing, empty, 4 GiB, noise; the CA's is noise.

    Pods get NPUs all the while; labels are back when they are well.
    """
    for name in ("token", "ca.crt"):
        for bad in ("pipe", "folder", "missing", "empty", "sparse", "noise"):
            with replaced(here.agent.node.account / name, bad):
                await here.fault("npu0", "dead")
                await here.healthy(1)
                await here.fault("npu0", "ok")
                await here.well()
                await here.pod()
    await labels_again(here)
