"""Who may read the pages: tokens, rights, and an API server that answers or does not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web

from npu_agent.kube import Api
from npu_agent.kube.credentials import at
from npu_agent.outputs.web.authorization import Authorizer, ReviewTiming
from tests.kube.helpers import hangs
from tests.kube.helpers import serving as api_server
from tests.outputs.web.helpers import PROMETHEUS, Scene, serving

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
async def authorizer(cluster: Cluster) -> AsyncIterator[Authorizer]:
    async with api_server(cluster.reply) as server:
        api = Api(lambda: at(server.url, "a test"))
        yield Authorizer(api, ReviewTiming(deadline=30.0))
        await api.close()


async def answered(
    authorizer: Authorizer, token: str, path: str = "/metrics", address: str = WHERE
) -> tuple[int, str]:
    """Status and body; 200 for the page."""
    refused = await authorizer.refusal(f"Bearer {token}", path, address)
    return (refused.status, refused.body.decode()) if refused else (200, "")


@pytest.mark.parametrize(
    ("token", "path", "status", "words"),
    [
        ("good", "/metrics", 200, ""),
        ("poor", "/metrics", 403, "nobody may not get /metrics"),
        ("good", "/status.json", 403, "prometheus may not get /status.json"),
        ("wrong", "/metrics", 401, "does not accept this token"),
    ],
)
async def test_a_token_with_the_right_gets_the_page_and_others_read_what_they_lack(
    token: str, path: str, status: int, words: str, cluster: Cluster, authorizer: Authorizer
) -> None:
    found = await answered(authorizer, token, path)
    assert found[0] == status
    assert words in found[1]
    results = {200: "allowed", 403: "forbidden", 401: "unauthenticated"}
    assert +authorizer.results == {results[status]: 1}
    assert ("SubjectAccessReview" in cluster.asked) == (status != 401)


@pytest.mark.parametrize("header", ["", "good", "Basic good", "Bearer", "Bearer  "])
async def test_without_a_token_the_api_server_is_not_asked(
    header: str, cluster: Cluster, authorizer: Authorizer
) -> None:
    refused = await authorizer.refusal(header, "/metrics", WHERE)
    assert refused
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert cluster.asked == []


async def test_a_clients_right_is_cached_for_a_while_and_no_longer(
    cluster: Cluster, authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    authorizer.timing = replace(authorizer.timing, deadline=1e6)
    for _ in range(50):
        assert (await answered(authorizer, "good"))[0] == 200
    assert len(cluster.asked) == 2
    cluster.rights.clear()
    now += 119.0
    assert (await answered(authorizer, "good"))[0] == 200
    now += 2.0
    assert (await answered(authorizer, "good"))[0] == 403


async def test_an_api_server_that_is_away_lets_known_clients_go_on(
    cluster: Cluster, authorizer: Authorizer, caplog: pytest.LogCaptureFixture
) -> None:
    assert await answered(authorizer, "good") == (200, "")
    patient = authorizer.timing
    authorizer.timing = replace(patient, deadline=0.1)
    cluster.away = True
    assert await answered(authorizer, "good") == (200, "")
    for _ in range(3):
        status, words = await answered(authorizer, "poor")
        assert status == 503
        assert "cannot check your token" in words
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "cannot authorize" in record.getMessage()
    authorizer.timing = patient
    cluster.away = False
    assert (await answered(authorizer, "poor"))[0] == 403


async def test_an_agent_without_the_right_to_ask_names_the_command_that_shows_the_remedy(
    cluster: Cluster, authorizer: Authorizer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.forbids = True
    assert (await answered(authorizer, "good"))[0] == 503
    assert "`npu-agent doctor` shows the command" in str(
        [each.__dict__["fields"]["reason"] for each in caplog.records if "fields" in each.__dict__]
    )


async def test_ever_new_tokens_are_limited_by_address_and_keep_no_other_client_out(
    cluster: Cluster, authorizer: Authorizer
) -> None:
    authorizer.timing = replace(authorizer.timing, window=0.5)
    assert await answered(authorizer, "good") == (200, "")
    authorizer.timing = replace(authorizer.timing, window=1e6)
    answers = [(await answered(authorizer, f"token {at}"))[0] for at in range(40)]
    assert set(answers) == {401, 429}
    assert answers.count(401) <= 10
    assert await answered(authorizer, "good") == (200, "")
    assert (await answered(authorizer, "poor", address="10.0.0.8"))[0] == 403
    assert len(cluster.asked) < 16
    authorizer.timing = replace(authorizer.timing, window=0.0)
    assert (await answered(authorizer, "poor"))[0] == 403, "in the next window"


async def test_the_cache_of_rights_is_bounded(cluster: Cluster, authorizer: Authorizer) -> None:
    authorizer.timing = replace(authorizer.timing, questions=1_000)
    cluster.users = {f"token-{at}": "prometheus" for at in range(257)}
    for token in cluster.users:
        assert (await answered(authorizer, token))[0] == 200
    asked = len(cluster.asked)
    assert (await answered(authorizer, "token-256"))[0] == 200
    assert len(cluster.asked) == asked
    assert (await answered(authorizer, "token-0"))[0] == 200
    assert len(cluster.asked) > asked


async def test_with_real_requests(authorizer: Authorizer) -> None:
    found = {}
    async with (
        serving(Scene(), authorizer=authorizer) as (host, port),
        aiohttp.ClientSession(f"http://{host}:{port}") as session,
    ):
        for token in ("good", "poor", None):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get("/metrics", headers=headers) as answer:
                found[token] = answer.status
                assert (await answer.read() == PROMETHEUS) == (answer.status == 200)
    assert found == {"good": 200, "poor": 403, None: 401}
