"""The server on real sockets, with clients as they are and as they should not be."""

import asyncio
import contextlib
import errno
import gzip
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from npu_agent.outputs.web import connections
from npu_agent.outputs.web.pages import Probes
from npu_agent.outputs.web.server import MOST, Server, listen
from npu_agent.threads import DaemonThread
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import PROMETHEUS, Scene, listening, read, serving
from tests.until import until

Address = tuple[str, int]
ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
ONCE = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LIMIT = 20.0
"""Seconds for anything: CI machines are slow."""


@asynccontextmanager
async def client(scene: Scene) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serving(scene) as (host, port),
        aiohttp.ClientSession(
            f"http://{host}:{port}",
            timeout=aiohttp.ClientTimeout(total=LIMIT),
            auto_decompress=False,
        ) as session,
    ):
        yield session


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


async def test_every_page_by_http() -> None:
    async with client(Scene(cards=(read(state()),))) as session:
        for path, kind in (
            ("/", "text/html; charset=utf-8"),
            ("/status.json", "application/json; charset=utf-8"),
            ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
            ("/metrics?collect[]=x", "text/plain; version=0.0.4; charset=utf-8"),
            ("/healthz", "text/plain; charset=utf-8"),
            ("/readyz", "application/json; charset=utf-8"),
        ):
            async with session.get(path, headers={"Accept-Encoding": "identity"}) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
                assert "Content-Encoding" not in answer.headers
                assert answer.headers["Server"] == "npu-agent"
                body = await answer.read()
            async with session.head(path, headers={"Accept-Encoding": "identity"}) as answer:
                assert answer.status == 200
                assert int(answer.headers["Content-Length"]) > 0
                assert await answer.read() == b""
            if path == "/metrics":
                assert body == PROMETHEUS


async def test_compressed_where_it_is_taken() -> None:
    async with client(Scene(cards=(read(state()),))) as session:
        for path in ("/", "/status.json", "/metrics"):
            async with session.get(path, headers={"Accept-Encoding": "gzip"}) as answer:
                assert answer.headers["Content-Encoding"] == "gzip"
                assert "Accept-Encoding" in answer.headers["Vary"]
                assert gzip.decompress(await answer.read())


async def test_no_writes_and_nothing_else() -> None:
    async with client(Scene()) as session:
        async with session.post("/metrics", data=b"x" * 1_000) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        async with session.get("/favicon.ico") as answer:
            assert answer.status == 404
            assert (await answer.text()).count("\n") == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xa5" * 200,
        b"\x00\x00\x00\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=range(10),
)
async def test_nonsense_is_refused_and_no_news(
    nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Scene()) as address:
        answer = await said(address, nonsense)
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
        assert b"Traceback" not in answer
        assert await scrape(address) == PROMETHEUS
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_fault_of_our_own_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    pages = scene.pages()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    pages.answer = broken  # type: ignore[assignment,method-assign]
    server = Server(("127.0.0.1", 0), pages)
    running = asyncio.create_task(server.run())
    address = await listening(server)
    answer = await said(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 500 " in answer
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
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


async def test_at_the_cap_the_oldest_that_has_sent_nothing_makes_room() -> None:
    async with serving(Scene(), most=3) as address:
        asks, silent, newer = [await connect(address) for _ in range(3)]
        await asked(*asks)
        newest = await connect(address)
        await ended(*silent)
        last = await connect(address)
        await ended(*newer)
        for each in (asks, newest, last):
            await asked(*each)
            await closed(each[1])


async def test_at_the_cap_of_those_that_asked_the_one_that_asked_longest_ago_makes_room() -> None:
    async with serving(Scene(), most=2) as address:
        first, second = await connect(address), await connect(address)
        for each in (first, second, first):
            await asked(*each)
        third = await connect(address)
        await ended(*second)
        for each in (first, third):
            await asked(*each)
            await closed(each[1])


@pytest.mark.parametrize("says", [b"", b"GET /metr", ASK], ids=["nothing", "half", "all"])
async def test_connections_that_are_held_keep_no_client_away(says: bytes) -> None:
    """There are twice as many of them as there may be."""
    async with serving(Scene()) as address:
        held = [await connect(address) for _ in range(2 * MOST)]
        for _, writer in held:
            writer.write(says)
        for _ in range(10):
            assert PROMETHEUS in await said(address, ONCE)
        for _, writer in held:
            await closed(writer)


async def test_probes_are_answered_by_a_listener_of_their_own_while_the_public_one_is_full() -> (
    None
):
    pages = Scene().pages()
    public = Server(("127.0.0.1", 0), pages, most=1)
    probes = Server(("127.0.0.1", 0), Probes(pages))
    running = [asyncio.create_task(server.run()) for server in (public, probes)]
    address = await listening(public)
    taken = await connect(address)
    await asked(*taken)
    newer = await connect(address)
    await asked(*newer)
    assert public.made_room == 1
    probed = await listening(probes)
    answers = [
        await said(probed, ONCE.replace(b"/metrics", path))
        for path in (b"/healthz", b"/readyz", b"/metrics", b"/")
    ]
    assert [int(answer.split()[1]) for answer in answers] == [200, 200, 404, 404]
    assert PROMETHEUS not in b"".join(answers)
    assert not probes.made_room
    for _, writer in (taken, newer):
        await closed(writer)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize(
    "start", [b"", b"GET /metrics HTTP/1.1\r\nHo", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_a_client_that_falls_silent_is_let_go(
    start: bytes,
) -> None:
    async with serving(Scene(), silence=0.2) as address:
        await said(address, start)  # returns when the server has closed


async def test_a_client_that_drips_is_let_go() -> None:
    async with serving(Scene(), silence=0.3) as address:
        reader, writer = await connect(address)
        ended = asyncio.create_task(rest(reader))
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        while not ended.done():
            writer.write(b"X-Drip: x\r\n")
            await asyncio.sleep(0.05)
            assert not writer.is_closing() or ended.done() or await ended == b""
        await closed(writer)


@asynccontextmanager
async def not_taking(address: Address) -> AsyncIterator[socket.socket]:
    """A client that asks for a large page and takes nothing of it."""
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LIMIT):
            await loop.sock_connect(stalled, address)
            await loop.sock_sendall(stalled, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        yield stalled


async def test_a_client_that_does_not_take_its_answer_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_ANSWER", 0.2)
    body = b"x" * 30_000_000
    async with (
        serving(Scene(metrics=body), silence=3600.0) as address,
        not_taking(address) as stalled,
    ):
        await asyncio.to_thread(_gone, stalled)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def _gone(stalled: socket.socket) -> None:
    """Returns when the server has dropped the connection: its reset is seen without reading."""
    import select

    poll = select.poll()
    poll.register(stalled, 0)
    assert any(mask & (select.POLLERR | select.POLLHUP) for _, mask in poll.poll(LIMIT * 1000))


async def test_it_ends_though_clients_are_connected() -> None:
    server = Server(("127.0.0.1", 0), Scene(metrics=b"x" * 30_000_000).pages())
    running = asyncio.create_task(server.run())
    address = await listening(server)
    idle = [await connect(address) for _ in range(10)]
    async with not_taking(address) as stalled:
        await asyncio.to_thread(_readable, stalled)
        running.cancel()
        async with asyncio.timeout(LIMIT):  # the stalled one alone could take 10 s
            await asyncio.gather(running, return_exceptions=True)
        assert server.listening.value is None
        for reader, writer in idle:
            assert await rest(reader) == b""
            await closed(writer)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


def _readable(stalled: socket.socket) -> None:
    """Returns when the answer has begun to come."""
    import select

    assert select.select([stalled], [], [], LIMIT)[0]


async def test_a_port_that_is_taken_is_told_once_and_had_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_agent.outputs.web.server._FIRST", 0.01)
    caplog.set_level(logging.INFO)
    tries = 0
    bind = socket.create_server

    def counted(*args: object, **more: object) -> socket.socket:
        nonlocal tries
        tries += 1
        return bind(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("npu_agent.outputs.web.server.socket.create_server", counted)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        tries = 0
        server = Server(address, Scene().pages())
        running = asyncio.create_task(server.run())
        await until(lambda: tries > 4)
        (told,) = caplog.records
        fields = told.__dict__["fields"]
        assert told.levelno == logging.ERROR
        assert fields["address"] == f"127.0.0.1:{address[1]}"
        assert "metrics.listen" in fields["reason"]
        assert server.listening.value is None
    assert await listening(server) == address
    assert await scrape(address) == PROMETHEUS
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


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


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
async def test_every_interface_of_a_host_without_ipv6(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = socket.create_server

    def without(*args: object, **more: object) -> socket.socket:
        if more.get("family") == socket.AF_INET6:
            raise OSError(number, "no IPv6")
        return bind(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("npu_agent.outputs.web.server.socket.create_server", without)
    async with serving(Scene(), ("", 0)) as (host, port):
        assert host == "0.0.0.0"
        assert await scrape(("127.0.0.1", port)) == PROMETHEUS
    async with serving(Scene(), ("localhost", 0)) as (_, port):
        assert await scrape(("127.0.0.1", port)) == PROMETHEUS


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        (("no-such-host.invalid", 0), "resolved"),
        (("192.0.2.1", 0), "no such address"),
    ],
)
async def test_an_address_that_is_not_to_be_had(
    address: Address, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(address, Scene().pages())
    running = asyncio.create_task(server.run())
    await until(lambda: bool(caplog.records))
    assert remedy in caplog.records[0].__dict__["fields"]["reason"]
    assert "metrics.listen" in caplog.records[0].__dict__["fields"]["reason"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_name_that_is_never_resolved_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("npu_agent.outputs.web.server._RESOLVE", 0.01)
    monkeypatch.setattr("npu_agent.outputs.web.server._RESOLVER", DaemonThread("test"))
    monkeypatch.setattr("npu_agent.outputs.web.server._FIRST", 0.01)
    monkeypatch.setattr(
        "npu_agent.outputs.web.server.socket.getaddrinfo",
        lambda host, port, **_: answered.wait(LIMIT) and [(socket.AF_INET, 0, 0, "", (host, port))],
    )
    server = Server(("127.0.0.1", 0), Scene().pages())
    running = asyncio.create_task(server.run())
    await until(lambda: bool(caplog.records))
    assert "is not resolved" in caplog.records[0].__dict__["fields"]["reason"]
    answered.set()
    assert await scrape(await listening(server)) == PROMETHEUS  # without help
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host's name stands for 127.0.0.1 and 127.0.0.2."""
    monkeypatch.setattr(
        "npu_agent.outputs.web.server.socket.getaddrinfo",
        lambda _, port, **__: [
            (socket.AF_INET, 0, 0, "", (number, port)) for number in ("127.0.0.1", "127.0.0.2")
        ],
    )


@pytest.mark.usefixtures("two_addresses")
async def test_a_name_of_two_addresses_has_one_port() -> None:
    sockets = await listen(("two", 0))
    try:
        names = [each.getsockname() for each in sockets]
        assert [number for number, _ in names] == ["127.0.0.1", "127.0.0.2"]
        assert names[0][1] == names[1][1]
    finally:
        for each in sockets:
            each.close()


@pytest.mark.usefixtures("two_addresses")
async def test_a_name_of_which_one_address_is_taken_is_not_served_by_half() -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await listen(("two", port))
        with socket.create_server(("127.0.0.1", port)):
            pass  # what could be had was closed again
