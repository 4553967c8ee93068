import gzip
import json
import logging

import pytest

from npu_agent.core.state import SessionPhase
from npu_agent.outputs.web.page import POLICY
from npu_agent.outputs.web.routes import HttpAnswer, Preferences
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import RESOURCE
from tests.outputs.web.helpers import PROMETHEUS, Scene, fenced

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "kind", "end"),
    [
        (PROMETHEUS_3, "application/openmetrics-text; version=1.0.0; charset=utf-8", b"# EOF\n"),
        ("", "text/plain; version=0.0.4; charset=utf-8", b""),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", b""),
    ],
)
def test_metrics_in_the_form_that_was_asked_for(accept: str, kind: str, end: bytes) -> None:
    answer = Scene().pages().answer("GET", "/metrics", accept=accept)
    assert (answer.headers["Content-Type"], answer.body) == (kind, PROMETHEUS + end)
    assert answer.headers["Vary"] == "Accept, Accept-Encoding, Accept-Language"


def test_readiness_says_why_not_and_the_agent_is_alive_all_the_same() -> None:
    scene = Scene(cards=(state(),))
    pages = scene.pages()
    answer = pages.answer("GET", "/readyz")
    assert (answer.status, json.loads(answer.body)) == (200, {"ready": True, "reasons": []})
    scene.phase, scene.reason = SessionPhase.BLOCKED, "mount it"
    answer = pages.answer("GET", "/readyz")
    reasons = [f"{RESOURCE}: blocked: mount it"]
    assert (answer.status, json.loads(answer.body)) == (503, {"ready": False, "reasons": reasons})
    assert pages.answer("GET", "/healthz").body == b"ok\n"


@pytest.mark.parametrize(
    ("path", "foreign"),
    [
        ("/", (b"http://", b"https://", b" src=")),
        ("/runbook", (b"<script", b" src=", b'href="http')),
    ],
)
def test_a_page_brings_all_that_it_may_use(path: str, foreign: tuple[bytes, ...]) -> None:
    answer = Scene().pages().answer("GET", path)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "'unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert not [word for word in foreign if word in answer.body]
    # Without a script the status page is loaded again by the browser itself.
    assert (b'<noscript><meta http-equiv="refresh"' in answer.body) == (path == "/")


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("", "en"),
        ("ko-KR,ko;q=0.9,en-US;q=0.8", "ko"),
        ("fr, JA;q=0.5", "ja"),
        ("en-US,en;q=0.9,ko;q=0.8", "en"),
        ("fr,*;q=0.1", "en"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/runbook"])
def test_pages_are_in_the_readers_language(accepted: str, language: str, path: str) -> None:
    answer = Scene().pages().answer("GET", path, languages=accepted)
    assert f'<html lang="{language}"'.encode() in answer.body


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_an_answer_is_made_once_for_all_clients(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, now = Scene(cards=(state(),), fresh=0.9), 100.0
    pages = scene.pages()
    monkeypatch.setattr("time.monotonic", lambda: now)
    first = pages.answer("GET", path, encodings="gzip")
    scene.cards, scene.metrics = (fenced(state(), "dead", 1),), PROMETHEUS * 2
    now += 0.8
    assert pages.answer("GET", path, encodings="gzip") is first
    now += 0.2
    assert pages.answer("GET", path, encodings="gzip").body != first.body


@pytest.mark.parametrize(
    ("path", "forms"),
    [("/", 3), ("/runbook", 3), ("/metrics", 2), ("/status.json", 1), ("/readyz", 1)],
)
def test_headers_that_a_page_does_not_use_make_no_new_form(path: str, forms: int) -> None:
    """One client without a token varied three of them, and took all of the loop with 64 cards."""
    scene = Scene(fresh=60.0)
    pages = scene.pages()
    rendered: list[Preferences] = []
    route = pages._routes[path]

    def render(wanted: Preferences) -> HttpAnswer:
        rendered.append(wanted)
        return route.render(wanted)

    pages._routes = {path: route._replace(render=render)}
    bodies = set()
    for accept in ("", "application/openmetrics-text", "text/html"):
        for encodings in ("", "gzip", "deflate"):
            for language in ("en", "ko", "ja", "fr", "zh-TW"):
                answer = pages.answer(
                    "GET", path, accept=accept, encodings=encodings, languages=language
                )
                packed = "Content-Encoding" in answer.headers
                bodies.add(gzip.decompress(answer.body) if packed else answer.body)
    assert len(bodies) == len(rendered) == len(pages._cache) == forms


def test_answers_that_are_no_longer_fresh_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pages = 100.0, Scene(fresh=0.9).pages()
    monkeypatch.setattr("time.monotonic", lambda: now)
    for language in ("en", "ko", "ja"):
        pages.answer("GET", "/", languages=language)
    now += 1
    pages.answer("GET", "/metrics")
    assert len(pages._cache) == 1


@pytest.mark.parametrize("now", [-1.0, 2.0**33])
def test_pages_are_packed_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    pages = Scene().pages()
    monkeypatch.setattr("time.time", lambda: now)
    packed = pages.answer("GET", "/metrics", encodings="deflate, gzip")
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == PROMETHEUS


def test_a_page_that_fails_costs_no_other_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(metrics=RuntimeError("broken"))
    pages = scene.pages()
    for _ in range(5):
        assert pages.answer("GET", "/metrics").status == 500
        assert pages.answer("GET", "/healthz").status == 200
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    scene.metrics = b""
    assert pages.answer("GET", "/metrics").status == 200
    scene.metrics = RuntimeError("again")
    assert b"again" not in pages.answer("GET", "/metrics").body
    assert len(caplog.records) == 2
