import gzip
import json
import logging
from dataclasses import replace

import pytest

from npu_agent.core.state import SessionPhase
from npu_agent.outputs.web.page import POLICY
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import RESOURCE
from tests.outputs.web.helpers import PROMETHEUS, Scene, fenced


async def test_metrics_are_passed_on_in_the_form_that_was_asked_for() -> None:
    pages = Scene().pages()
    plain = await pages.answer("GET", "/metrics")
    assert plain.body == PROMETHEUS
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "Content-Encoding" not in plain.headers
    other = await pages.answer(
        "GET", "/metrics", accept="application/openmetrics-text", encodings="gzip"
    )
    assert other.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert other.headers["Content-Encoding"] == "gzip"
    for answer in (plain, other):
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"


async def test_readiness_says_why_not() -> None:
    scene = Scene(cards=(state(),))
    pages = scene.pages()
    answer = await pages.answer("GET", "/readyz")
    assert (answer.status, json.loads(answer.body)) == (200, {"ready": True, "reasons": []})
    scene.phase, scene.reason = SessionPhase.BLOCKED, "mount it"
    answer = await pages.answer("GET", "/readyz")
    reasons = [f"{RESOURCE}: blocked: mount it"]
    assert (answer.status, json.loads(answer.body)) == (503, {"ready": False, "reasons": reasons})


async def test_the_agent_is_alive_whatever_the_kubelet_does_() -> None:
    scene = Scene(cards=(state(),), phase=SessionPhase.REGISTERING, reason="the kubelet is away")
    pages = scene.pages()
    assert (await pages.answer("GET", "/healthz")).body == b"ok\n"


async def test_nothing_can_be_changed() -> None:
    pages = Scene().pages()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FROB"):
        answer = await pages.answer(method, "/metrics")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/nothing", "//", "/metrics/", "", "/../etc/passwd"])
async def test_what_is_not_there(path: str) -> None:
    answer = await Scene().pages().answer("GET", path)
    assert answer.status == 404
    assert answer.body.count(b"\n") == 1


async def test_the_page_brings_all_that_it_may_use() -> None:
    answer = await Scene().pages().answer("GET", "/")
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "'unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for word in (b"http://", b"https://", b" src="):
        assert word not in answer.body


async def test_the_runbook_is_a_page_that_needs_nothing_else() -> None:
    answer = await Scene().pages().answer("GET", "/runbook")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert b'id="npucardunhealthy"' in answer.body
    for word in (b"<script", b" src=", b'href="http'):
        assert word not in answer.body


async def test_the_page_is_made_once_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(cards=(state(),))
    pages = scene.pages()
    first = await pages.answer("GET", "/")
    scene.cards = (fenced(state(), "dead", 1),)
    assert (await pages.answer("GET", "/")).body is first.body
    monkeypatch.setattr("npu_agent.outputs.web.pages._FRESH", -1.0)
    assert b"unhealthy" in (await pages.answer("GET", "/")).body


@pytest.mark.parametrize("now", [-1.0, 2.0**33])
async def test_pages_are_packed_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    pages = Scene().pages()
    monkeypatch.setattr("time.time", lambda: now)
    packed = await pages.answer("GET", "/metrics", encodings="gzip")
    assert gzip.decompress(packed.body) == PROMETHEUS


async def test_status_is_made_once_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(cards=(state(),))
    pages = scene.pages()
    first = await pages.answer("GET", "/status.json")
    packed = await pages.answer("GET", "/status.json", encodings="gzip")
    scene.cards = (fenced(state(), "dead", 1),)
    assert (await pages.answer("GET", "/status.json")).body is first.body
    assert (await pages.answer("GET", "/status.json", encodings="gzip")).body is packed.body
    assert gzip.decompress(packed.body) == first.body
    monkeypatch.setattr("npu_agent.outputs.web.pages._FRESH", -1.0)
    assert b"unhealthy" in (await pages.answer("GET", "/status.json")).body


async def test_a_page_that_fails_costs_no_other_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(metrics=RuntimeError("broken"))
    pages = scene.pages()
    for _ in range(5):
        assert (await pages.answer("GET", "/metrics")).status == 500
        assert (await pages.answer("GET", "/healthz")).status == 200
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    scene.metrics = b""
    assert (await pages.answer("GET", "/metrics")).status == 200
    scene.metrics = RuntimeError("again")
    assert b"again" not in (await pages.answer("GET", "/metrics")).body
    assert len(caplog.records) == 2


async def test_a_key_that_waits_for_a_restart_is_told_as_json() -> None:
    scene = Scene()
    scene.config = replace(scene.config, waiting=("pluginDir",))
    found = json.loads((await scene.pages().answer("GET", "/status.json")).body)
    assert found["config"]["waiting"] == ["pluginDir"]
