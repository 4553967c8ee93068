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
from npu_agent.outputs.web.words import LANGUAGES

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
class PageAnswer:
    """An HTTP answer."""

    body: bytes
    headers: Mapping[str, str]
    status: HTTPStatus = HTTPStatus.OK


class Preferences(NamedTuple):
    """The preferences of a client."""

    openmetrics: bool
    language: str
    """One of `LANGUAGES`."""


Routes = Mapping[str, Callable[[Preferences], PageAnswer]]
"""By path, what makes an answer."""


def probes(state: Callable[[], AgentState]) -> Routes:
    def ready(_: Preferences) -> PageAnswer:
        reasons = unready(state())
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json({"ready": not reasons, "reasons": reasons}, status)

    return {"/healthz": lambda _: text_answer("ok\n"), "/readyz": ready}


def pages(
    metrics: Callable[[bool], bytes], state: Callable[[], AgentState], history: History
) -> Routes:
    def for_prometheus(wanted: Preferences) -> PageAnswer:
        kind = _OPENMETRICS if wanted.openmetrics else _TEXT
        return _answer(metrics(wanted.openmetrics), kind)

    def status_page(wanted: Preferences) -> PageAnswer:
        from npu_agent.outputs.web.page import page

        return _html(page(state(), history.of, wanted.language))

    def steps(wanted: Preferences) -> PageAnswer:
        from npu_agent.outputs.web.page import runbook

        return _html(runbook(wanted.language))

    return {
        "/": status_page,
        "/status.json": lambda _: _json(as_json(state())),
        "/runbook": steps,
        "/metrics": for_prometheus,
        **probes(state),
    }


class Pages:
    """Answers requests; a fault in one page affects no other."""

    def __init__(self, routes: Routes, *, fresh: float = _FRESH) -> None:
        self._routes = routes
        self._fresh = fresh
        self._cache: dict[tuple[str, Preferences, bool], tuple[float, PageAnswer]] = {}
        """By path and form: until when (`time.monotonic`), and what."""
        self._failing: set[str] = set()

    def answer(
        self,
        method: str,
        path: str,
        *,
        accept: str = "",
        encodings: str = "",
        languages: str = "",
    ) -> PageAnswer:
        """The answer to a request; HEAD as GET: the caller leaves out the body.

        `path` has no query; the others are the headers Accept, Accept-Encoding and
        Accept-Language.
        """
        if path not in self._routes:
            message = f"not found; there are {' '.join(self._routes)}\n"
            return text_answer(message, HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            text = "only GET and HEAD: nothing can be changed over HTTP\n"
            return text_answer(text, HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        # As the clients of Prometheus and most servers have it: weights are not compared.
        wanted = Preferences(
            openmetrics="application/openmetrics-text" in accept,
            language=_language(languages),
        )
        form = (path, wanted, "gzip" in encodings)
        now = time.monotonic()
        until, answer = self._cache.get(form, (now, None))
        if answer is None or now >= until:
            answer = self._rendered(*form)
            self._cache = {key: kept for key, kept in self._cache.items() if kept[0] > now}
            self._cache[form] = now + self._fresh, answer
        return answer

    def _rendered(self, path: str, wanted: Preferences, packed: bool) -> PageAnswer:
        try:
            answer = self._routes[path](wanted)
        except Exception:  # the edge: the other pages, and the connection, go on
            if path not in self._failing:
                log.exception("a page failed to render", path=path)
            self._failing.add(path)
            text = "internal error: see the agent's log\n"
            return text_answer(text, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._failing.discard(path)
        if not packed or len(answer.body) < _WORTH_IT:
            return answer
        # The format has no room for a time before 1970 or after 2106, which a wrong clock may say.
        body = gzip.compress(answer.body, compresslevel=1, mtime=0)
        return replace(answer, body=body, headers={**answer.headers, "Content-Encoding": "gzip"})


def _language(accepted: str) -> str:
    """The language that a browser puts first among those there are, else English.

    Browsers list them by preference, with weights that fall: weights are not compared.
    """
    tags = (tag.split(";")[0].strip().lower().split("-")[0] for tag in accepted.split(","))
    return next((tag for tag in tags if tag in LANGUAGES), "en")


def text_answer(text: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> PageAnswer:
    return _answer(text.encode(), _PLAIN, status, **headers)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> PageAnswer:
    return _answer(f"{json.dumps(value, indent=2)}\n".encode(), _JSON, status)


def _html(document: str) -> PageAnswer:
    from npu_agent.outputs.web.page import POLICY

    headers = {"Content-Security-Policy": POLICY, **_PAGE_HEADERS}
    return _answer(document.encode(), _HTML, HTTPStatus.OK, **headers)


def _answer(
    body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, **headers: str
) -> PageAnswer:
    return PageAnswer(body, {"Content-Type": kind, **_HEADERS, **headers}, status)
