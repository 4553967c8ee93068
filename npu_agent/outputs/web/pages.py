"""What is served: a request's path and headers in, an answer out. No I/O."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as TEXT
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS

from npu_agent.core.problems import unready
from npu_agent.core.state import AgentState
from npu_agent.logs import logger
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.negotiate import takes_gzip, wants_openmetrics
from npu_agent.outputs.web.page import POLICY, page
from npu_agent.outputs.web.status import as_json

log = logger(__name__)

_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_HTML = "text/html; charset=utf-8"

_FRESH = 0.9
"""Seconds for which a rendered status page is kept for all readers: it costs some ms."""
_WORTH_IT = 1000
"""Bytes from which on an answer is compressed."""
_PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Metrics(Protocol):
    """Gives the bytes of /metrics, ready to be sent."""

    def __call__(self, *, openmetrics: bool, gzip: bool) -> Awaitable[bytes]:
        """The page in OpenMetrics or in the text format, compressed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent to a client."""

    status: HTTPStatus = HTTPStatus.OK
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Pages:
    """Answers requests; a fault in one page affects no other."""

    def __init__(
        self, *, metrics: Metrics, state: Callable[[], AgentState], history: History
    ) -> None:
        """`metrics` is the page for Prometheus; `state` puts together what the others show."""
        self._metrics = metrics
        self._state = state
        self._history = history
        self._routes: Mapping[str, Callable[[str, bool], Awaitable[Answer]]] = {
            "/": self._page,
            "/status.json": self._status,
            "/metrics": self._for_prometheus,
            "/healthz": self._alive,
            "/readyz": self._ready,
        }
        self._made: tuple[Answer, Answer] | None = None
        """The status page rendered last, as it is and compressed."""
        self._made_at = 0.0
        """When: `time.monotonic`."""
        self._failing: set[str] = set()
        """Paths whose last answer failed."""

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
        route = self._routes.get(path)
        if route is None:
            text = f"not found; there are {' '.join(self._routes)}\n"
            return _of(text, _PLAIN, HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            text = "only GET and HEAD: nothing can be changed over HTTP\n"
            return _of(text, _PLAIN, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        try:
            found = await route(accept, takes_gzip(encodings))
        except Exception:  # the edge: the other pages, and the connection, go on
            if path not in self._failing:
                log.exception("a page failed to render", path=path)
            self._failing.add(path)
            text = "internal error: see the agent's log\n"
            return _of(text, _PLAIN, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._failing.discard(path)
        return found

    async def _for_prometheus(self, accept: str, zipped: bool) -> Answer:
        openmetrics = wants_openmetrics(accept)
        headers = {
            "Content-Type": OPENMETRICS if openmetrics else TEXT,
            "Vary": "Accept, Accept-Encoding",
            **({"Content-Encoding": "gzip"} if zipped else {}),
        }
        body = await self._metrics(openmetrics=openmetrics, gzip=zipped)
        return Answer(body=body, headers=headers)

    async def _alive(self, _: str, __: bool) -> Answer:
        return _of("ok\n", _PLAIN)

    async def _ready(self, _: str, __: bool) -> Answer:
        reasons = [str(reason) for reason in unready(self._state())]
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _of(_json({"ready": not reasons, "reasons": reasons}), _JSON, status)

    async def _status(self, _: str, zipped: bool) -> Answer:
        found = _of(_json(as_json(self._state())), _JSON)
        return _zipped(found) if zipped else found

    async def _page(self, _: str, zipped: bool) -> Answer:
        now = time.monotonic()
        if self._made is None or now - self._made_at > _FRESH:
            plain = _of(page(self._state(), self._history.of), _HTML, more=_PAGE_HEADERS)
            self._made, self._made_at = (plain, _zipped(plain)), now
        return self._made[zipped]


def _of(
    text: str,
    kind: str,
    status: HTTPStatus = HTTPStatus.OK,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    headers = {
        "Content-Type": kind,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **more,
    }
    return Answer(status=status, body=text.encode(), headers=headers)


def _zipped(plain: Answer) -> Answer:
    headers = {**plain.headers, "Vary": "Accept-Encoding"}
    if len(plain.body) < _WORTH_IT:
        return replace(plain, headers=headers)
    body = gzip.compress(plain.body, compresslevel=1)
    return replace(plain, body=body, headers={**headers, "Content-Encoding": "gzip"})


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
