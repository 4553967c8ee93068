"""The server on real sockets, with clients as they are and as they should not be."""

import asyncio
import contextlib
import logging
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from npu_agent.outputs.web.routes import Router, probes
from npu_agent.outputs.web.server import PortLimits, Server
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import PROMETHEUS, Scene, listening, read, running, serving
from tests.until import until

Address = tuple[str, int]
ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
ONCE = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LIMIT = 20.0
"""Seconds for anything: CI machines are slow."""


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.open_connection(*address)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes, in whichever way it does."""
    found = b""
    async with asyncio.timeout(LIMIT):
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(65_536):
                found += more
    return found


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def said(address: Address, request: bytes) -> bytes:
    """What the server answers to these very bytes."""
    reader, writer = await connect(address)
    writer.write(request)
    try:
        return await rest(reader)
    finally:
        await closed(writer)


async def scrape(address: Address) -> bytes:
    url = f"http://{address[0]}:{address[1]}/metrics"
    timeout = aiohttp.ClientTimeout(total=LIMIT)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_every_page_by_http(encoding: str) -> None:
    async with (
        serving(Scene(cards=(read(state()),))) as (host, port),
        aiohttp.ClientSession(
            f"http://{host}:{port}",
            timeout=aiohttp.ClientTimeout(total=LIMIT),
            headers={"Accept-Encoding": encoding},
        ) as session,
    ):
        for path, kind in (
            ("/", "text/html; charset=utf-8"),
            ("/status.json", "application/json; charset=utf-8"),
            ("/metrics?collect[]=x", "text/plain; version=0.0.4; charset=utf-8"),
            ("/healthz", "text/plain; charset=utf-8"),
        ):
            async with session.get(path) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
                packed = encoding == "gzip" and path != "/healthz"
                assert answer.headers.get("Content-Encoding") == ("gzip" if packed else None)
                assert answer.headers["Server"] == "npu-agent"
                body = await answer.read()
            async with session.head(path) as answer:
                assert answer.status == 200
                assert int(answer.headers["Content-Length"]) > 0
                assert await answer.read() == b""
            if path.startswith("/metrics"):
                assert body == PROMETHEUS
        async with session.post("/metrics", data=b"x" * 1_000) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        async with session.get("/favicon.ico") as answer:
            assert answer.status == 404


@pytest.mark.parametrize(
    ("nonsense", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xa5" * 200, 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000 + b"\r\n", 400),
    ],
    ids=range(5),
)
async def test_nonsense_is_refused_and_no_news(
    nonsense: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Scene()) as address:
        answer = await said(address, nonsense)
        assert answer.startswith((b"HTTP/1.0 %d " % status, b"HTTP/1.1 %d " % status))
        assert b"Traceback" not in answer
        assert (b"Remove the cookies of this host" in answer) == (status == 431)
        assert await scrape(address) == PROMETHEUS
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("header", ["Cookie", "Authorization"])
async def test_cookies_of_localhost_and_tokens_with_many_groups_are_read(header: str) -> None:
    async with serving(Scene()) as address:
        line = f"{header}: {'x' * 16_000}\r\n".encode()
        for _ in range(2):
            answer = await said(address, ONCE.replace(b"\r\n", b"\r\n" + line, 1))
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_requests_may_follow_each_other_unanswered() -> None:
    async with serving(Scene()) as address:
        answer = await said(address, ASK + ASK + ONCE)
        assert answer.count(b"HTTP/1.1 200 ") == 3


async def test_requests_sent_before_a_client_takes_its_answer_are_not_kept() -> None:
    """64 clients that sent requests of 160 KB and read nothing took 600 MB."""
    page = b"x" * 30_000_000
    async with serving(Scene(metrics=page)) as address:
        reader, writer = await connect(address)
        writer.write(ASK)
        async with asyncio.timeout(LIMIT):
            start = await reader.readuntil(b"\r\n\r\n")
            more = ASK.replace(b"\r\n\r\n", (b"\r\nX: " + b"a" * 3_000) * 5 + b"\r\n\r\n")
            writer.write(more * 5 + ONCE)
            await writer.drain()
        answers = start + await rest(reader)
        assert answers.count(b"HTTP/1.1 ") == 1
        assert len(answers) > len(page)
        await closed(writer)


async def test_after_a_large_body_nothing_is_taken_for_a_request() -> None:
    """What was dropped of it would make the next client's request, by a proxy, a part of it."""
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
    async with serving(Scene()) as address:
        reader, writer = await connect(address)
        writer.write(post + b"a" * 60_000)
        async with asyncio.timeout(LIMIT):
            start = await reader.readuntil(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 405 ")
        writer.write(ASK * 400)
        assert b"HTTP/1." not in await rest(reader)
        await closed(writer)


async def test_a_fault_of_our_own_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Router, "answer", broken)
    async with serving(Scene()) as address:
        assert b" 500 " in await said(address, ONCE)
    assert any(record.exc_info for record in caplog.records)


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks on an open connection, and gets the page."""
    writer.write(ASK)
    async with asyncio.timeout(LIMIT):
        await reader.readuntil(PROMETHEUS)


async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Returns when the server has ended this connection."""
    assert await rest(reader) == b""
    await closed(writer)


async def test_at_the_cap_the_oldest_makes_room() -> None:
    async with serving(Scene(), limits=PortLimits(connections=2)) as address:
        oldest, older = [await connect(address) for _ in range(2)]
        await asked(*oldest)
        newest = await connect(address)
        await asked(*newest)
        await ended(*oldest)
        await asked(*older)
        for _, writer in (older, newest):
            await closed(writer)


async def test_probes_are_answered_by_a_listener_of_their_own_while_the_public_one_is_full() -> (
    None
):
    scene = Scene()
    public = Server("metrics", ("127.0.0.1", 0), scene.pages(), PortLimits(connections=1))
    other = Server("probes", ("127.0.0.1", 0), Router(probes(scene.state)))
    async with running(public, other):
        address = await listening(public)
        taken, newer = await connect(address), await connect(address)
        await asked(*newer)
        assert public.made_room == 1
        probed = await listening(other)
        answers = [
            await said(probed, ONCE.replace(b"/metrics", path))
            for path in (b"/healthz", b"/readyz", b"/metrics", b"/")
        ]
        assert [int(answer.split()[1]) for answer in answers] == [200, 200, 404, 404]
        assert not other.made_room
        for _, writer in (taken, newer):
            await closed(writer)


LONG = b"GET / HTTP/1.1\r\n" + (b"X: " + b"a" * 2_000 + b"\r\n") * 30 + b"\r\n"
"""More than 48 KiB: it has no end for the server."""


@pytest.mark.parametrize("start", [b"", b"GET /metrics HTTP/1.1\r\nHo", ASK, LONG])
async def test_a_client_that_falls_silent_is_let_go(start: bytes) -> None:
    async with serving(Scene(), limits=PortLimits(silence=0.2)) as address:
        await said(address, start)  # returns when the server has closed


@asynccontextmanager
async def not_taking(address: Address) -> AsyncIterator[socket.socket]:
    """A client that asks for a large page and takes nothing of it."""
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT):
            await loop.sock_connect(stalled, address)
            await loop.sock_sendall(stalled, ASK)
        yield stalled


async def test_a_client_that_does_not_take_its_answer_is_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = PortLimits(answer=0.2, silence=3600.0)
    async with (
        serving(Scene(metrics=b"x" * 30_000_000), limits=limits) as address,
        not_taking(address) as stalled,
    ):
        await asyncio.to_thread(_gone, stalled)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def _gone(stalled: socket.socket) -> None:
    """Returns when the server has dropped the connection: its reset is seen without reading."""
    poll = select.poll()
    poll.register(stalled, 0)
    assert any(mask & (select.POLLERR | select.POLLHUP) for _, mask in poll.poll(LIMIT * 1000))


async def test_the_server_ends_though_clients_are_connected() -> None:
    server = Server("metrics", ("127.0.0.1", 0), Scene(metrics=b"x" * 30_000_000).pages())
    task = asyncio.create_task(server.run())
    address = await listening(server)
    idle = [await connect(address) for _ in range(10)]
    async with not_taking(address) as stalled:
        assert (await asyncio.to_thread(select.select, [stalled], [], [], LIMIT))[0]
        task.cancel()
        async with asyncio.timeout(LIMIT):  # the stalled one alone could take 10 s
            await asyncio.gather(task, return_exceptions=True)
        assert server.listening.value is None
        for reader, writer in idle:
            assert await rest(reader) == b""
            await closed(writer)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_a_port_that_is_taken_is_logged_once_and_had_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        server = Server("metrics", address, Scene().pages(), PortLimits(retry_first=0.01))
        async with running(server):
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(0.1)
            (record,) = caplog.records
            fields = record.__dict__["fields"]
            assert fields["address"] == f"127.0.0.1:{address[1]}"
            assert "metrics.listen" in fields["reason"]
            assert server.listening.value is None
            other.close()
            assert await listening(server) == address
            assert await scrape(address) == PROMETHEUS


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_every_interface_by_ipv4_and_ipv6() -> None:
    async with serving(Scene(), ("", 0)) as (_, port):
        assert await scrape(("127.0.0.1", port)) == PROMETHEUS
        if _has_ipv6():
            assert await scrape(("[::1]", port)) == PROMETHEUS


async def test_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with serving(Scene(), ("", 0)) as (host, port):
        assert host == "0.0.0.0"
        assert await scrape(("127.0.0.1", port)) == PROMETHEUS


@pytest.mark.parametrize("host", ["localhost", "192.0.2.1"])
async def test_an_address_that_is_not_to_be_had(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A name is not even resolved: that may hang."""
    async with running(Server("metrics", (host, 0), Scene().pages())):
        await until(lambda: bool(caplog.records))
        assert ": correct metrics.listen" in caplog.records[0].__dict__["fields"]["reason"]
