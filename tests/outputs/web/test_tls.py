"""TLS at the public port: real certificates, replaced while the server runs."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from npu_agent.core.state import TlsState
from npu_agent.outputs.web.server import PortLimits, Server
from npu_agent.outputs.web.tls import Certificates, TlsFiles
from tests.outputs.web.certificates import Authority, authority, placed
from tests.outputs.web.helpers import LIMITS, PROMETHEUS, Scene, listening, running, serving
from tests.outputs.web.test_server import LIMIT, Address
from tests.until import first

DAY = 86_400


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("other"), "other")


@asynccontextmanager
async def encrypted(
    files: TlsFiles, limits: PortLimits = LIMITS
) -> AsyncIterator[tuple[Certificates, Address]]:
    certificates = Certificates(files, interval=0.01)
    async with serving(Scene(), limits=limits, certificates=certificates) as address:
        yield certificates, address


async def scrape(address: Address, trusting: ssl.SSLContext | bool, scheme: str = "https") -> bytes:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session,
        session.get(f"{scheme}://{address[0]}:{address[1]}/metrics", ssl=trusting) as answer,
    ):
        return await answer.read()


async def shown(address: Address) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(LIMIT):
        _, writer = await asyncio.open_connection(*address, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return bytes(found)


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text(encoding="utf-8"))


async def test_pages_by_https_and_by_nothing_else(ours: Authority, tmp_path: Path) -> None:
    async with encrypted(placed(tmp_path, ours.sign("server"))) as (_, address):
        assert await scrape(address, ours.trusting()) == PROMETHEUS
        with pytest.raises(aiohttp.ClientError):
            await scrape(address, True, "http")
        async with asyncio.timeout(LIMIT):
            reader, writer = await asyncio.open_connection(*address, ssl=ours.trusting())
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            # A reset, such as the one at a deadline, would be a ConnectionError here.
            assert (await reader.read()).endswith(PROMETHEUS)
        writer.close()


async def test_only_clients_with_a_certificate_of_the_authority(
    ours: Authority, other: Authority, tmp_path: Path
) -> None:
    async with encrypted(placed(tmp_path, ours.sign("server"), other.ca)) as (_, address):
        client = other.sign("client", usage="clientAuth")
        assert await scrape(address, ours.trusting(client)) == PROMETHEUS
        stranger = ours.sign("stranger", usage="clientAuth")
        for refused in (ours.trusting(), ours.trusting(stranger)):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await scrape(address, refused)


async def test_a_new_certificate_is_in_force_for_new_requests(
    ours: Authority, tmp_path: Path
) -> None:
    old, new = ours.sign("old", days=2), ours.sign("new", days=5)
    connector = aiohttp.TCPConnector(ssl=ours.trusting())
    async with encrypted(placed(tmp_path, old)) as (certificates, address):
        assert await shown(address) == der(old[0])
        expires_at = certificates.state.value.expires_at
        assert expires_at == pytest.approx(time.time() + 2 * DAY, abs=600)
        # One that stays connected is disconnected, connects again, and finds the new one.
        base = f"https://{address[0]}:{address[1]}"
        async with aiohttp.ClientSession(base, connector=connector) as session:
            async with session.get("/metrics") as answer:
                assert answer.headers.get("Connection") != "close"
                await answer.read()
            placed(tmp_path, new)
            await first(certificates.state, lambda state: state.expires_at != expires_at)
            async with session.get("/metrics") as answer:
                assert await answer.read() == PROMETHEUS
        assert await shown(address) == der(new[0])


async def test_a_bad_one_keeps_the_last_good_one_and_is_logged_once(
    ours: Authority, other: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = ours.sign("good")
    bad: dict[str, tuple[Path, Path]] = {
        "KEY_VALUES_MISMATCH": (good[0], other.sign("key")[1]),
        "PEM lib": (ours.directory / "extensions", good[1]),
    }
    async with encrypted(placed(tmp_path, good)) as (certificates, address):
        force = certificates.state.value
        for words, files in bad.items():
            caplog.clear()
            placed(tmp_path, files)
            state = await first(certificates.state, lambda s, w=words: w in (s.error or ""))  # type: ignore[misc]
            assert state.expires_at == force.expires_at
            assert await shown(address) == der(good[0])
            assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
        (tmp_path / "tls.key").unlink()
        await first(certificates.state, lambda state: "is missing" in (state.error or ""))
        placed(tmp_path, good)
        await first(certificates.state, lambda state: state == force)
        assert await scrape(address, ours.trusting()) == PROMETHEUS


@pytest.mark.parametrize("content", ["", "no certificate", "key"])
async def test_an_authority_of_clients_that_is_none(
    ours: Authority, tmp_path: Path, content: str
) -> None:
    files = placed(tmp_path, ours.sign("server"), ours.ca)
    (tmp_path / "ca.crt").write_text(
        files.key.read_text(encoding="utf-8") if content == "key" else content, encoding="utf-8"
    )
    certificates = Certificates(files)
    async with running(certificates):
        state = await first(certificates.state, lambda state: state.error)
    assert "ca.crt has no certificate of an authority" in (state.error or "")


async def test_without_a_good_one_nothing_is_served_until_there_is(
    ours: Authority, tmp_path: Path
) -> None:
    mismatched = ours.sign("one")[0], ours.sign("two")[1]
    certificates = Certificates(placed(tmp_path, mismatched), interval=0.01)
    server = Server("metrics", ("127.0.0.1", 0), Scene().pages(), certificates=certificates)
    async with running(certificates, server):
        state = await first(certificates.state, lambda state: state.error)
        assert "the key that of the first certificate" in str(state.error)
        assert state == TlsState(error=state.error)
        assert server.listening.value is None
        placed(tmp_path, ours.sign("good"))
        assert await scrape(await listening(server), ours.trusting()) == PROMETHEUS


@pytest.mark.parametrize("days", [-1, 2, 20_000])  # from 2050 on the time has another form
async def test_an_expired_certificate_is_served_and_its_expiry_reported(
    ours: Authority, tmp_path: Path, days: int
) -> None:
    cert = ours.sign("one", days=days)
    async with encrypted(placed(tmp_path, cert)) as (certificates, address):
        expires_at = certificates.state.value.expires_at
        assert expires_at == pytest.approx(time.time() + days * DAY, abs=600)
        assert await shown(address) == der(cert[0])


async def test_a_handshake_that_never_ends_is_ended(ours: Authority, tmp_path: Path) -> None:
    files, limits = placed(tmp_path, ours.sign("server")), PortLimits(handshake=0.2)
    async with encrypted(files, limits) as (_, address):
        silent = [await asyncio.open_connection(*address) for _ in range(8)]
        for reader, writer in silent:
            async with asyncio.timeout(LIMIT):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert await scrape(address, ours.trusting()) == PROMETHEUS
