"""Routes requests: path and headers in, an answer out. No I/O."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import NamedTuple

from npu_agent.core.problems import unready
from npu_agent.core.state import AgentState
from npu_agent.logs import logger
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.status import as_json
from npu_agent.wording import ENGLISH, LANGUAGES

log = logger(__name__)

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_HTML = "text/html; charset=utf-8"

_FRESH = 0.9
"""Seconds for which an answer is kept for all readers: what shows the whole state costs some ms of
the event loop."""
_WORTH_IT = 1000
"""Bytes from which on an answer is compressed."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Vary": "Accept, Accept-Encoding, Accept-Language",
    "X-Content-Type-Options": "nosniff",
}
_PAGE_HEADERS = {"Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An HTTP answer."""

    body: bytes
    headers: Mapping[str, str]
    status: HTTPStatus = HTTPStatus.OK


class Preferences(NamedTuple):
    """The preferences of a client."""

    openmetrics: bool
    language: str
    """One of `LANGUAGES`."""


class Route(NamedTuple):
    """What makes the answer of a path, and which preferences make another one of it.

    Each form is rendered and kept for itself, so that a client that varies its headers takes as
    much of the event loop as there are forms.
    """

    render: Callable[[Preferences], HttpAnswer]
    in_formats: bool = False
    in_languages: bool = False


Routes = Mapping[str, Route]
"""By path."""


@dataclass(slots=True)
class _Kept:
    until: float
    """Of `time.monotonic`."""
    answer: HttpAnswer
    packed: HttpAnswer | None = None
    """By gzip; None: it was not asked for so."""


def probes(state: Callable[[], AgentState]) -> Routes:
    def ready(_: Preferences) -> HttpAnswer:
        reasons = tuple(map(ENGLISH.unready, unready(state())))
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json({"ready": not reasons, "reasons": reasons}, status)

    return {"/healthz": Route(lambda _: text_answer("ok\n")), "/readyz": Route(ready)}


def routes(
    metrics: Callable[[bool], bytes],
    state: Callable[[], AgentState],
    history: History,
    read: Callable[[], None],
) -> Routes:
    """The pages of the agent; `read` is called when one with readings is made."""

    def for_prometheus(wanted: Preferences) -> HttpAnswer:
        read()
        kind = _OPENMETRICS if wanted.openmetrics else _TEXT
        return _answer(metrics(wanted.openmetrics), kind)

    def status_page(wanted: Preferences) -> HttpAnswer:
        from npu_agent.outputs.web.page import page

        read()
        return _html(page(state(), history.of, wanted.language))

    def steps(wanted: Preferences) -> HttpAnswer:
        from npu_agent.outputs.web.page import runbook

        return _html(runbook(wanted.language))

    def for_programs(_: Preferences) -> HttpAnswer:
        read()
        return _json(as_json(state()))

    return {
        "/": Route(status_page, in_languages=True),
        "/status.json": Route(for_programs),
        "/runbook": Route(steps, in_languages=True),
        "/metrics": Route(for_prometheus, in_formats=True),
        **probes(state),
    }


class Router:
    """Answers requests; a fault in one page affects no other."""

    def __init__(self, routes: Routes, *, fresh: float = _FRESH) -> None:
        self._routes = routes
        self._fresh = fresh
        self._cache: dict[tuple[str, Preferences], _Kept] = {}
        self._failing: set[str] = set()

    def answer(
        self,
        method: str,
        path: str,
        *,
        accept: str = "",
        encodings: str = "",
        languages: str = "",
    ) -> HttpAnswer:
        """The answer to a request; HEAD as GET: the caller leaves out the body.

        `path` has no query; the others are the headers Accept, Accept-Encoding and
        Accept-Language.
        """
        route = self._routes.get(path)
        if route is None:
            message = f"not found; there are {' '.join(self._routes)}\n"
            return text_answer(message, HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            text = "only GET and HEAD: nothing can be changed over HTTP\n"
            return text_answer(text, HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        # As the clients of Prometheus and most servers have it: weights are not compared.
        wanted = Preferences(
            openmetrics=route.in_formats and "application/openmetrics-text" in accept,
            language=_language(languages) if route.in_languages else "en",
        )
        kept = self._fresh_answer(path, route, wanted)
        if "gzip" not in encodings or len(kept.answer.body) < _WORTH_IT:
            return kept.answer
        if kept.packed is None:
            kept.packed = _packed(kept.answer)
        return kept.packed

    def _fresh_answer(self, path: str, route: Route, wanted: Preferences) -> _Kept:
        now = time.monotonic()
        kept = self._cache.get((path, wanted))
        if kept is None or now >= kept.until:
            kept = _Kept(now + self._fresh, self._rendered(path, route, wanted))
            self._cache = {form: other for form, other in self._cache.items() if other.until > now}
            self._cache[path, wanted] = kept
        return kept

    def _rendered(self, path: str, route: Route, wanted: Preferences) -> HttpAnswer:
        try:
            answer = route.render(wanted)
        except Exception:  # the edge: the other pages, and the connection, go on
            if path not in self._failing:
                log.exception("a page failed to render", path=path)
            self._failing.add(path)
            text = "internal error: see the agent's log\n"
            return text_answer(text, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._failing.discard(path)
        return answer


def _packed(answer: HttpAnswer) -> HttpAnswer:
    # The format has no room for a time before 1970 or after 2106, which a wrong clock may say.
    body = gzip.compress(answer.body, compresslevel=1, mtime=0)
    return replace(answer, body=body, headers={**answer.headers, "Content-Encoding": "gzip"})


def _language(accepted: str) -> str:
    """The language that a browser puts first among those there are, else English.

    Browsers list them by preference, with weights that fall: weights are not compared.
    """
    tags = (tag.split(";")[0].strip().lower().split("-")[0] for tag in accepted.split(","))
    return next((tag for tag in tags if tag in LANGUAGES), "en")


def text_answer(text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> HttpAnswer:
    return _answer(text.encode(), _PLAIN, status, **headers)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpAnswer:
    return _answer(f"{json.dumps(value, indent=2)}\n".encode(), _JSON, status)


def _html(document: str) -> HttpAnswer:
    from npu_agent.outputs.web.page import POLICY

    headers = {"Content-Security-Policy": POLICY, **_PAGE_HEADERS}
    return _answer(document.encode(), _HTML, HTTPStatus.OK, **headers)


def _answer(
    body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, **headers: str
) -> HttpAnswer:
    return HttpAnswer(body, {"Content-Type": kind, **_HEADERS, **headers}, status)
