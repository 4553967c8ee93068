"""Who may read the pages: tokens, rights, and an API server that answers or does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from npu_agent.kube import Api
from npu_agent.kube.credentials import Credentials
from npu_agent.outputs.web import authorization
from npu_agent.outputs.web.authorization import Authorizer, Pace
from npu_agent.outputs.web.server import Server
from npu_agent.outputs.web.tls import Certificates
from tests.kube.helpers import hangs, serving
from tests.outputs.web.certificates import authority, placed
from tests.outputs.web.helpers import PROMETHEUS, Scene, listening

WHERE = "10.0.0.7"
EXTRA = {"authentication.kubernetes.io/pod-name": ["prometheus-0"]}


@dataclass
class Cluster:
    """Whose tokens there are, and what who may get."""

    users: dict[str, str] = field(default_factory=lambda: {"good": "prometheus", "poor": "nobody"})
    rights: set[tuple[str, str]] = field(default_factory=lambda: {("prometheus", "/metrics")})
    asked: list[str] = field(default_factory=list)
    away: bool = False
    forbids: bool = False

    async def reply(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return await hangs(request)
        review = await request.json()
        self.asked.append(review["kind"])
        spec = review["spec"]
        if self.forbids:
            body = {"kind": "Status", "apiVersion": "v1", "code": 403, "message": "User cannot"}
            return web.json_response(body, status=403)
        if request.path == "/apis/authentication.k8s.io/v1/tokenreviews":
            name = self.users.get(spec["token"])
            user = {"username": name, "groups": ["a", "b"], "uid": "7", "extra": EXTRA}
            review["status"] = {"authenticated": True, "user": user} if name else {}
        else:
            assert request.path == "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            assert (spec["groups"], spec["uid"], spec["extra"]) == (["a", "b"], "7", EXTRA)
            wanted = spec["nonResourceAttributes"]
            assert wanted["verb"] == "get"
            review["status"] = {"allowed": (spec["user"], wanted["path"]) in self.rights}
        return web.json_response(review, status=201)


@pytest.fixture
async def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def authorizer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Authorizer]:
    monkeypatch.setattr(authorization, "_DEADLINE", 30.0)
    async with serving(cluster.reply) as server:
        api = Api(credentials=Credentials(server=server.url, source="a test"))
        yield Authorizer(api)
        await api.close()


async def answered(
    authorizer: Authorizer, token: str, path: str = "/metrics", address: str = WHERE
) -> tuple[int, str]:
    """Status and body; 200 for the page."""
    refused = await authorizer.refusal(f"Bearer {token}", path, address)
    return (refused.status, refused.body.decode()) if refused else (200, "")


async def test_a_token_with_the_right_gets_the_page_and_others_are_told_what_they_lack(
    cluster: Cluster, authorizer: Authorizer
) -> None:
    assert await answered(authorizer, "good") == (200, "")
    status, words = await answered(authorizer, "poor")
    assert status == 403
    assert "nobody may not get /metrics" in words
    status, words = await answered(authorizer, "good", "/status.json")
    assert status == 403
    assert "prometheus may not get /status.json" in words
    status, words = await answered(authorizer, "wrong")
    assert status == 401
    assert "does not accept this token" in words
    assert +authorizer.results == {"allowed": 1, "forbidden": 2, "unauthenticated": 1}
    assert cluster.asked.count("SubjectAccessReview") == 3  # none for nobody's token


@pytest.mark.parametrize("header", ["", "good", "Basic good", "Bearer", "Bearer  "])
async def test_without_a_token_nobody_is_asked(
    header: str, cluster: Cluster, authorizer: Authorizer
) -> None:
    refused = await authorizer.refusal(header, "/metrics", WHERE)
    assert refused
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert cluster.asked == []


async def test_the_scheme_is_in_any_case(authorizer: Authorizer) -> None:
    assert await authorizer.refusal("bearer good", "/metrics", WHERE) is None


async def test_answers_are_kept_for_a_while_and_no_longer(
    cluster: Cluster, authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(authorization, "_now", lambda: now)
    for _ in range(50):
        assert (await answered(authorizer, "good"))[0] == 200
        assert (await answered(authorizer, "poor"))[0] == 403
    assert len(cluster.asked) == 4
    cluster.rights = {("nobody", "/metrics")}
    now += 11.0
    assert (await answered(authorizer, "poor"))[0] == 200
    assert (await answered(authorizer, "good"))[0] == 200  # kept for two minutes
    now += 110.0
    assert (await answered(authorizer, "good"))[0] == 403


async def test_an_api_server_that_is_away_lets_known_clients_go_on(
    cluster: Cluster,
    authorizer: Authorizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await answered(authorizer, "good") == (200, "")
    cluster.away = True
    deadline = authorization._DEADLINE
    monkeypatch.setattr(authorization, "_DEADLINE", 0.1)
    assert await answered(authorizer, "good") == (200, "")
    for _ in range(3):
        status, words = await answered(authorizer, "poor")
        assert status == 503
        assert "the API server cannot be asked" in words
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "cannot be authorized" in record.getMessage()
    cluster.away = False
    monkeypatch.setattr(authorization, "_DEADLINE", deadline)
    assert (await answered(authorizer, "poor"))[0] == 403  # what failed is not kept


async def test_an_agent_without_the_right_to_ask_names_the_command_that_shows_the_remedy(
    cluster: Cluster, authorizer: Authorizer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbids = True
    assert (await answered(authorizer, "good"))[0] == 503
    assert "`npu-agent doctor` shows the command" in str(
        [each.__dict__["fields"]["reason"] for each in caplog.records if "fields" in each.__dict__]
    )


async def test_ever_new_tokens_are_limited_by_address_and_keep_nobody_else_out(
    cluster: Cluster, authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorization, "_now", lambda: 1000.0)
    assert await answered(authorizer, "good") == (200, "")
    answers = [(await answered(authorizer, f"token {at}"))[0] for at in range(40)]
    assert set(answers) == {401, 429}
    assert answers.count(401) < 12
    assert await answered(authorizer, "good") == (200, "")
    assert (await answered(authorizer, "poor", address="10.0.0.8"))[0] == 403
    assert len(cluster.asked) < 16


async def test_what_is_kept_is_bounded_and_refusals_push_out_no_good_ones(
    cluster: Cluster, authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorization, "_KEPT", 3)
    assert await answered(authorizer, "good") == (200, "")
    for at in range(8):
        assert (await answered(authorizer, f"wrong-{at}", address=f"10.0.1.{at}"))[0] == 401
    assert len(authorizer._refused) == 3
    asked = len(cluster.asked)
    assert await answered(authorizer, "good") == (200, "")
    assert len(cluster.asked) == asked


async def test_requests_with_one_token_at_the_same_time_ask_few_times(
    cluster: Cluster, authorizer: Authorizer
) -> None:
    answers = await asyncio.gather(*(answered(authorizer, "good") for _ in range(8)))
    assert {status for status, _ in answers} == {200}
    assert cluster.asked.count("TokenReview") <= authorization._AT_ONCE


async def test_by_https_with_real_requests(authorizer: Authorizer, tmp_path: Path) -> None:
    ours = authority(tmp_path / "authority")
    certificates = Certificates(placed(tmp_path, ours.sign("server")))
    server = Server(
        ("127.0.0.1", 0), Scene().pages(), certificates=certificates, authorizer=authorizer
    )
    running = [asyncio.create_task(part.run()) for part in (certificates, server)]
    host, port = await listening(server)
    connector = aiohttp.TCPConnector(ssl=ours.trusting())
    found = {}
    async with aiohttp.ClientSession(f"https://{host}:{port}", connector=connector) as session:
        for token in ("good", "poor", "wrong", None):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get("/metrics", headers=headers) as answer:
                body = await answer.read()
                found[token] = answer.status
                assert (body == PROMETHEUS) == (answer.status == 200)
    assert found == {"good": 200, "poor": 403, "wrong": 401, None: 401}
    for task in running:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*running)


def taken(pace: Pace, address: str, times: int, now: float = 0.0) -> int:
    """How many of so many that come at the same time."""
    return sum(pace.take(address, now) for _ in range(times))


def pace(**rates: float) -> Pace:
    return Pace(**{"rate": 16.0, "rate_each": 4.0, "seconds": 2.0, **rates})


def test_an_address_is_held_to_its_rate_and_others_are_not() -> None:
    ours = pace()
    assert taken(ours, "a", 1000) == 9  # 2 seconds' worth, and the one that uses them up
    assert taken(ours, "b", 5) == 5
    assert taken(ours, "a", 1000, now=1.0) == 4
    assert taken(ours, "a", 1000, now=100.0) == 9  # what was not used is not saved up


def test_many_addresses_are_held_to_a_rate_together() -> None:
    ours = pace()
    assert sum(taken(ours, f"address {at}", 1) for at in range(1000)) == 65
    assert taken(ours, "late", 1, now=1.0) == 1


def test_who_comes_seldom_is_taken_when_others_use_up_the_rate_of_all() -> None:
    ours = pace()
    for second in range(10):
        for address in range(10):
            taken(ours, f"address {address}", 100, now=float(second))
        assert taken(ours, "seldom", 2, now=float(second)) == 1


def test_who_is_refused_pays_nothing_for_it() -> None:
    ours = pace()
    for at in range(100):
        taken(ours, "a", 100, now=at / 100)
    assert taken(ours, "a", 100, now=3.0) == 9


def test_what_is_remembered_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization, "_ADDRESSES", 3)
    ours = pace(rate=1e6)
    for at in range(100):
        assert taken(ours, f"address {at}", 1) == 1
    assert len(ours._each) == 3
