"""What is served: a request's path and headers in, an answer out. No I/O."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Protocol

from npu_agent.core.problems import unready
from npu_agent.core.state import AgentState
from npu_agent.logs import logger
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.negotiate import takes_gzip, wants_openmetrics
from npu_agent.outputs.web.page import POLICY, page, runbook
from npu_agent.outputs.web.status import as_json

log = logger(__name__)

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_HTML = "text/html; charset=utf-8"

_PROBED = ("/healthz", "/readyz")
_FRESH = 0.9
"""Seconds for which what shows the whole state is kept for all readers: it costs some ms."""
_WORTH_IT = 1000
"""Bytes from which on an answer is compressed."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Vary": "Accept, Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer."""
_PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Metrics(Protocol):
    """Gives the bytes of /metrics."""

    def __call__(self, *, openmetrics: bool) -> Awaitable[bytes]:
        """The page in OpenMetrics or in the text format."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent to a client."""

    body: bytes
    headers: Mapping[str, str]
    status: HTTPStatus = HTTPStatus.OK


class Answering(Protocol):
    """Answers requests."""

    async def answer(
        self, method: str, path: str, *, accept: str = "", encodings: str = ""
    ) -> Answer:
        """The answer to a request.

        Args:
            method: GET and HEAD are answered alike: the caller leaves out the body for HEAD.
            path: without a query.
            accept: the header Accept.
            encodings: the header Accept-Encoding.
        """


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A page that is kept for all readers."""

    answer: Answer
    packed: Answer
    """The same, compressed."""
    at: float
    """When it was rendered: `time.monotonic`."""


class Probes:
    """Answers the kubelet's probes, and nothing else."""

    def __init__(self, pages: Pages) -> None:
        """As `pages` answers them."""
        self._pages = pages

    async def answer(
        self, method: str, path: str, *, accept: str = "", encodings: str = ""
    ) -> Answer:
        """See `Answering`."""
        if path not in _PROBED:
            text = f"not found; there are {' '.join(_PROBED)}\n"
            return _answer(text, _PLAIN, HTTPStatus.NOT_FOUND)
        return await self._pages.answer(method, path, accept=accept, encodings=encodings)


class Pages:
    """Answers requests; a fault in one page affects no other."""

    def __init__(
        self, *, metrics: Metrics, state: Callable[[], AgentState], history: History
    ) -> None:
        """`metrics` is the page for Prometheus; `state` puts together what the others show."""
        self._metrics = metrics
        self._state = state
        self._history = history
        self._routes: Mapping[str, Callable[[str], Awaitable[Answer]]] = {
            "/": self._page,
            "/status.json": self._status,
            "/runbook": self._runbook,
            "/metrics": self._for_prometheus,
            "/healthz": self._alive,
            "/readyz": self._ready,
        }
        self._rendered: dict[str, _Rendered] = {}
        """By path: what was rendered last of the pages that show the whole state."""
        self._failing: set[str] = set()
        """Paths whose last answer failed."""

    async def answer(
        self, method: str, path: str, *, accept: str = "", encodings: str = ""
    ) -> Answer:
        """See `Answering`."""
        found = await self._found(method, path, accept)
        if len(found.body) < _WORTH_IT or not takes_gzip(encodings):
            return found
        kept = self._rendered.get(path)
        return kept.packed if kept and kept.answer is found else _packed(found)

    async def _found(self, method: str, path: str, accept: str) -> Answer:
        route = self._routes.get(path)
        if route is None:
            text = f"not found; there are {' '.join(self._routes)}\n"
            return _answer(text, _PLAIN, HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            text = "only GET and HEAD: nothing can be changed over HTTP\n"
            return _answer(text, _PLAIN, HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        try:
            found = await route(accept)
        except Exception:  # the edge: the other pages, and the connection, go on
            if path not in self._failing:
                log.exception("a page failed to render", path=path)
            self._failing.add(path)
            text = "internal error: see the agent's log\n"
            return _answer(text, _PLAIN, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._failing.discard(path)
        return found

    async def _for_prometheus(self, accept: str) -> Answer:
        openmetrics = wants_openmetrics(accept)
        body = await self._metrics(openmetrics=openmetrics)
        return _answer(body, _OPENMETRICS if openmetrics else _TEXT)

    async def _alive(self, _: str) -> Answer:
        return _answer("ok\n", _PLAIN)

    async def _ready(self, _: str) -> Answer:
        reasons = [str(reason) for reason in unready(self._state())]
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _answer(_json({"ready": not reasons, "reasons": reasons}), _JSON, status)

    async def _status(self, _: str) -> Answer:
        return self._kept("/status.json", lambda: _answer(_json(as_json(self._state())), _JSON))

    async def _runbook(self, _: str) -> Answer:
        def render() -> Answer:
            return _answer(runbook(), _HTML, HTTPStatus.OK, **_PAGE_HEADERS)

        return self._kept("/runbook", render)

    async def _page(self, _: str) -> Answer:
        def render() -> Answer:
            html = page(self._state(), self._history.of)
            return _answer(html, _HTML, HTTPStatus.OK, **_PAGE_HEADERS)

        return self._kept("/", render)

    def _kept(self, path: str, render: Callable[[], Answer]) -> Answer:
        """What was rendered for another reader, as long as it is fresh."""
        now, kept = time.monotonic(), self._rendered.get(path)
        if kept is None or now - kept.at > _FRESH:
            answer = render()
            kept = self._rendered[path] = _Rendered(answer, _packed(answer), now)
        return kept.answer


def _packed(answer: Answer) -> Answer:
    # The format has no room for a time before 1970 or after 2106, which a wrong clock may say.
    body = gzip.compress(answer.body, compresslevel=1, mtime=0)
    return replace(answer, body=body, headers={**answer.headers, "Content-Encoding": "gzip"})


def refusal(text: str, status: HTTPStatus, **headers: str) -> Answer:
    """An answer of one line, with these headers beside the usual ones."""
    return _answer(text, _PLAIN, status, **headers)


def _answer(
    body: str | bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, **more: str
) -> Answer:
    """An answer with this Content-Type and, beside the usual ones, `more` headers."""
    content = body.encode() if isinstance(body, str) else body
    return Answer(content, {"Content-Type": kind, **_HEADERS, **more}, status)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
