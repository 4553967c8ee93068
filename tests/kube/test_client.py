"""The client against an API server that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from aiohttp import web

from npu_agent.kube import Api, ApiError, ErrorKind, credentials, dra, node
from tests.kube.helpers import (
    DEADLINE,
    NODE,
    SLICE,
    Authority,
    Reply,
    Server,
    client,
    drops,
    drops_amid,
    hangs,
    kubeconfig,
    says,
    serving,
    status,
)
from tests.until import until

CLAIM = {"kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "n", "uid": "u"}}


async def trouble(api: Api) -> ApiError:
    """What a call raises; its line is one line, and of bounded length."""
    with pytest.raises(ApiError) as caught:
        await node.read(api, "n1")
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 1000
    return caught.value


async def trouble_at(tmp_path: Path, server: str) -> ApiError:
    """The same, of an API server at this URL of a kubeconfig."""
    async with client(kubeconfig(tmp_path, server)) as api:
        return await trouble(api)


def in_pod(
    monkeypatch: pytest.MonkeyPatch, server: Server, ca: Path, token: str | None = "first"
) -> Path:
    """Makes this a Pod of that API server; returns the token's file."""
    directory = credentials.DIRECTORY
    directory.mkdir()
    (directory / "ca.crt").write_bytes(ca.read_bytes())
    if token is not None:
        (directory / "token").write_text(token, encoding="utf-8")
    _, _, port = server.url.rpartition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    return directory / "token"


class Gate:
    """Answers once it is opened; counts who waits."""

    def __init__(self, body: object) -> None:
        self.waiting = 0
        self.open = asyncio.Event()
        self._reply = says(body)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.waiting += 1
        await self.open.wait()
        return await self._reply(request)


# Calls.


async def test_eight_calls_at_a_time(server: Server, api: Api) -> None:
    gate = Gate(CLAIM)
    server.replies = [gate]
    async with asyncio.TaskGroup() as calls:
        got = [calls.create_task(dra.read_claim(api, "n", f"c{at}")) for at in range(11)]
        await until(lambda: gate.waiting == 8)
        # Waiting for a place counts for the deadline.
        with pytest.raises(ApiError, match=r"has not answered within 0\.05 s"):
            await dra.read_claim(api, "n", "c", deadline=0.05)
        assert gate.waiting == 8
        gate.open.set()
    assert [each.result() for each in got] == [CLAIM] * 11


async def test_a_call_that_hangs_delays_no_other(server: Server, api: Api) -> None:
    server.replies = [hangs, says(CLAIM)]
    hanging = asyncio.create_task(node.read(api, "n1"))
    await until(lambda: len(server.asked) == 1)
    assert await dra.read_claim(api, "n", "c") == CLAIM
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


# Answers that are none.


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (says("<html>"), "no object, but '<html>'"),
        (says(b"\xff\x00\x1b[2J"), "no object"),
        (says("[" * 100_000), "no object"),
        (says({**NODE, "kind": "Node"}), "Node instead of PartialObjectMetadata"),
        (says("x" * 3_000_000), "more than 2097152 bytes"),
    ],
)
async def test_garbage(server: Server, api: Api, reply: Reply, words: str) -> None:
    server.replies = [reply]
    error = await trouble(api)
    assert error.kind is ErrorKind.GARBAGE
    assert words in str(error)
    server.replies = [says(NODE)]
    await node.read(api, "n1")


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
    assert (await trouble(api)).kind is ErrorKind.SERVER
    async with asyncio.timeout(DEADLINE):
        await stopped.wait()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(server: Server, api: Api, code: int) -> None:
    """It would be asked for with these credentials: by `kubectl proxy` they are a person's."""
    server.replies = [says("", code, {"Location": f"{server.url}/api/v1/secrets"})]
    error = await trouble(api)
    assert error.kind is ErrorKind.GARBAGE
    assert f"that leads to {server.url}/api/v1/secrets: no redirect is followed" in str(error)
    for call in (
        dra.list_slices(api, "n1", "d"),
        dra.apply_slice(api, SLICE),
        dra.delete_slice(api, "s"),
        follows(api),
    ):
        with pytest.raises(ApiError, match="no redirect is followed"):
            await call
    assert "/api/v1/secrets" not in [asked.path for asked in server.asked]
    assert len(server.asked) == 5


async def follows(api: Api) -> None:
    async with api.watch(dra.watch_slices("n1", "d"), "1", 60.0):
        pass


async def test_no_answer_sets_a_cookie(server: Server, tmp_path: Path) -> None:
    """By `kubectl proxy` the pages of all agents are one host's."""
    server.replies = [says(NODE, 200, {"Set-Cookie": "a=b; Path=/"})]
    named = server.url.replace("127.0.0.1", "localhost")  # an address is given none
    async with client(kubeconfig(tmp_path, named)) as api:
        await node.read(api, "n1")
        await node.read(api, "n1")
    assert ["Cookie" in asked.headers for asked in server.asked] == [False, False]


async def test_a_server_that_does_not_speak_http(tmp_path: Path) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        error = await trouble_at(tmp_path, f"http://127.0.0.1:{port}")
    assert error.kind is ErrorKind.GARBAGE
    assert "does not speak HTTP" in str(error)


# No answer.


async def half(request: web.Request) -> web.StreamResponse:
    """The beginning of an answer, and no more."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"{")
    return await hangs(request)


@pytest.mark.parametrize("reply", [hangs, half])
async def test_a_hang_ends_at_the_deadline(server: Server, api: Api, reply: Reply) -> None:
    server.replies = [says(NODE), reply]
    await node.read(api, "n1")  # reads the credentials, and they count for the deadline
    with pytest.raises(ApiError, match=f"{server.url} has not answered within 0.3 s") as caught:
        await dra.read_claim(api, "n", "c", deadline=0.3)
    assert (caught.value.kind, caught.value.status) == (ErrorKind.TIMEOUT, None)


@pytest.mark.parametrize("reply", [hangs, drops])
async def test_after_a_failure_the_credentials_are_read_again(
    server: Server, tmp_path: Path, reply: Reply
) -> None:
    async with serving(reply) as failing, client(kubeconfig(tmp_path, failing.url), 1.0) as api:
        with pytest.raises(ApiError):
            await dra.read_claim(api, "n", "c", deadline=0.3)
        kubeconfig(tmp_path, server.url)
        assert (await node.read(api, "n1")).name == "n1"


async def test_close_is_quick_while_a_call_hangs(server: Server, api: Api) -> None:
    server.replies = [hangs]
    call = asyncio.create_task(trouble(api))
    await until(lambda: server.asked)
    async with asyncio.timeout(DEADLINE):
        await api.close()
        assert (await call).kind is ErrorKind.UNREACHABLE


async def test_a_connection_that_breaks(server: Server, api: Api) -> None:
    for reply in (drops, drops_amid):
        server.replies = [reply]
        error = await trouble(api)
        assert error.kind is ErrorKind.UNREACHABLE
        assert f"cannot get Node n1: {server.url}: " in error.what
        assert "proxies on the way" in error.remedy


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1: no connection (Connection refused)"),
        ("http://nobody.invalid:1", "Cannot connect to host nobody.invalid:1"),
    ],
)
async def test_no_connection(tmp_path: Path, url: str, words: str) -> None:
    error = await trouble_at(tmp_path, url)
    assert error.kind is ErrorKind.UNREACHABLE
    assert words in error.what


@pytest.mark.parametrize("url", ["http://[1::2:3:", "ftp://127.0.0.1/", "nonsense"])
async def test_a_server_that_is_no_url(tmp_path: Path, url: str) -> None:
    error = await trouble_at(tmp_path, url)
    assert error.kind is ErrorKind.CREDENTIALS
    assert str(tmp_path / "kubeconfig") in str(error)


# Credentials.


async def test_in_a_pod(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server, serving(says(NODE)) as other:
        in_pod(monkeypatch, server, trusted.ca, "abc\n")  # client-go takes the line's end off too
        monkeypatch.setenv("KUBECONFIG", "/nonexistent")
        for path in (None, kubeconfig(tmp_path, other.url)):  # one that is given counts more
            async with client(path) if path else Api(deadline=DEADLINE) as api:
                assert (await node.read(api, "n1")).name == "n1"
    assert (server.tokens, other.tokens) == (["Bearer abc"], ["Bearer secret"])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert credentials.of_pod().server.startswith("https://[fd00::1]:")


async def test_the_kubeconfig_of_the_home(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path, server.url).rename(tmp_path / ".kube" / "config")
    async with Api(deadline=DEADLINE) as api:
        assert (await node.read(api, "n1")).name == "n1"


@pytest.mark.parametrize("given", [True, False], ids=["its CA", "the system's CAs"])
async def test_kubeconfig_with_tls(trusted: Authority, tmp_path: Path, given: bool) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server:
        cluster = {"certificate-authority": str(trusted.ca)} if given else {}
        async with client(kubeconfig(tmp_path, server.url, cluster=cluster)) as api:
            assert (await node.read(api, "n1")).name == "n1"


async def test_no_credentials_at_all(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Api(deadline=DEADLINE) as api:
        error = await trouble(api)
        assert error.kind is ErrorKind.CREDENTIALS
        for words in (
            "no credentials for the API server",
            str(credentials.DIRECTORY / "token"),
            str(tmp_path / ".kube/config"),
            "k8s/daemonset.yaml",
            "KUBECONFIG",
            "labels.output: none",
        ):
            assert words in str(error)
        monkeypatch.setenv("KUBECONFIG", f"/nonexistent:{kubeconfig(tmp_path, server.url)}")
        assert (await node.read(api, "n1")).name == "n1"  # the next call tries again


async def test_a_kubeconfig_that_takes_too_long_does_not_accuse_the_api_server(
    server: Server, tmp_path: Path
) -> None:
    """A named pipe without a writer, as a file on a mount that hangs."""
    os.mkfifo(tmp_path / "token")
    path = kubeconfig(tmp_path, server.url, user={"tokenFile": str(tmp_path / "token")})
    error = await trouble(client(path, 1.0))
    (tmp_path / "token").open("w", encoding="utf-8").close()  # and the thread ends
    assert error.kind is ErrorKind.TIMEOUT
    assert "nothing was sent within 1 s: the credentials are still being read" in error.what
    assert "login program" in error.remedy
    assert server.asked == []


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "token"),
        ("", "empty"),
        ("abc\r\nX-Injected: yes", "cannot be sent"),
    ],
)
async def test_a_bad_token(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch, token: str | None, words: str
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server, Api(deadline=DEADLINE) as api:
        path = in_pod(monkeypatch, server, trusted.ca, token)
        error = await trouble(api)
        assert error.kind is ErrorKind.CREDENTIALS
        assert words in str(error)
        assert str(path) in str(error)
        assert not server.asked
        path.write_text("good", encoding="utf-8")
        await node.read(api, "n1")


@pytest.mark.parametrize("content", ["missing", "no PEM", "another"])
async def test_a_bad_ca(
    trusted: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    async with serving(says(NODE), tls=trusted.context()) as server, Api(deadline=DEADLINE) as api:
        ca = in_pod(monkeypatch, server, trusted.ca).with_name("ca.crt")
        ca.write_bytes(other.ca.read_bytes() if content == "another" else content.encode())
        if content == "missing":
            ca.unlink()
        error = await trouble(api)
        assert error.kind is ErrorKind.CREDENTIALS
        assert str(ca) in str(error)
        assert ("signed it:" if content == "another" else "kube-root-ca.crt") in str(error)
        ca.write_bytes(trusted.ca.read_bytes())  # the CA was changed on disk
        await node.read(api, "n1")


async def test_a_certificate_for_another_name(other: Authority, tmp_path: Path) -> None:
    async with serving(says(NODE), tls=other.context()) as server:
        cluster = {"certificate-authority": str(other.ca)}
        async with client(kubeconfig(tmp_path, server.url, cluster=cluster)) as api:
            error = await trouble(api)
            assert error.kind is ErrorKind.CREDENTIALS
            assert "tls-server-name" in str(error)
            cluster["tls-server-name"] = "kubernetes.example"
            kubeconfig(tmp_path, server.url, cluster=cluster)
            await node.read(api, "n1")


async def test_tls_where_there_is_none(server: Server, tmp_path: Path) -> None:
    error = await trouble_at(tmp_path, server.url.replace("http:", "https:"))
    assert error.kind is ErrorKind.UNREACHABLE
    assert "SSL" in error.what


async def test_calls_at_the_same_time_learn_of_a_token_that_was_rotated(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        good = request.headers["Authorization"] == f"Bearer {path.read_text(encoding='utf-8')}"
        return await (says(CLAIM) if good else status(401, "Unauthorized"))(request)

    async with serving(reply, tls=trusted.context()) as server, Api(deadline=DEADLINE) as api:
        path = in_pod(monkeypatch, server, trusted.ca, "first")
        for token in ("first", "second"):
            path.write_text(token, encoding="utf-8")
            calls = (dra.read_claim(api, "n", "c") for _ in range(8))
            assert await asyncio.gather(*calls) == [CLAIM] * 8
        await dra.read_claim(api, "n", "c")
    # Once the first call has it, no other comes with the old one any more.
    assert server.tokens[-1] == "Bearer second"
    assert len(server.tokens) <= 8 + 16 + 1


async def test_the_token_is_read_again_before_it_expires(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "REREAD", 0.0)
    async with serving(says(NODE), tls=trusted.context()) as server, Api(deadline=DEADLINE) as api:
        path = in_pod(monkeypatch, server, trusted.ca, "first")
        await node.read(api, "n1")
        path.write_text("second", encoding="utf-8")
        await node.read(api, "n1")
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_token_that_is_no_good(server: Server, api: Api, tmp_path: Path) -> None:
    server.replies = [status(401, "Unauthorized")]
    for _ in range(2):
        error = await trouble(api)
        assert (error.kind, error.status) == (ErrorKind.UNAUTHORIZED, 401)
        assert str(tmp_path / "kubeconfig") in str(error)
    assert len(server.asked) == 4
    (tmp_path / "kubeconfig").unlink()
    assert (await trouble(api)).kind is ErrorKind.CREDENTIALS


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "while parsing"), ("current-context: x\ncontexts: []\nclusters: []", "name x")],
)
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(credentials.CredentialsError) as caught:
        credentials.of_kubeconfig(str(path))
    assert caught.value.what.startswith(f"the kubeconfig {path} cannot be used: ")
    assert words in caught.value.what
    assert str(caught.value).isprintable()


# The environment.


async def test_netrc_is_not_read(server: Server, api: Api, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("default login a password b\n", encoding="utf-8")
    await node.read(api, "n1")
    assert server.tokens == ["Bearer secret"]


async def test_a_login_that_hangs_has_one_thread_however_often_it_is_tried() -> None:
    go_on, begun = threading.Event(), list[str]()

    def login() -> credentials.Credentials:
        begun.append(threading.current_thread().name)
        go_on.wait(DEADLINE)
        return credentials.at("http://127.0.0.1:1", "a test")

    async with Api(login, deadline=0.05) as api:
        for _ in range(5):
            with pytest.raises(ApiError, match="the credentials are still being read"):
                await node.read(api, "n1")
        assert len(begun) == 1, "the others wait for it"
        go_on.set()
        kinds = set[ErrorKind]()
        while ErrorKind.UNREACHABLE not in kinds:  # then it has tried to connect
            with pytest.raises(ApiError) as caught:
                await node.read(api, "n1")
            kinds.add(caught.value.kind)
