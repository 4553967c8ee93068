"""What is served: a request's path and what its client takes in, an answer out. No I/O."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol

from npu_agent.logs import logger
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.negotiate import takes_gzip, wants_openmetrics
from npu_agent.outputs.web.page import POLICY, page
from npu_agent.outputs.web.status import Status, as_json

log = logger(__name__)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""The text format: prometheus.io/docs/instrumenting/exposition_formats."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PLAIN = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_HTML = "text/html; charset=utf-8"

_FRESH = 0.9
"""Seconds for which a page that was made for one reader is good for all: it costs some ms."""
_WORTH_IT = 1000
"""Bytes from which on an answer is compressed."""


class Metrics(Protocol):
    """Gives the bytes of /metrics, ready to be sent."""

    def __call__(self, *, openmetrics: bool, gzip: bool) -> bytes:
        """The page in OpenMetrics or in the text format, compressed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent to a client."""

    status: HTTPStatus = HTTPStatus.OK
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Pages:
    """Answers requests; a fault of one page is that page's alone."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        status: Callable[[], Status],
        unready: Callable[[], tuple[str, ...]],
        history: History,
        heartbeat: Callable[[], str | None] = lambda: None,
    ) -> None:
        """What the pages are made of; each is asked only when somebody asks for its page.

        Args:
            metrics: the page for Prometheus.
            status: how things stand.
            unready: `npu_agent.outputs.web.ready.reasons` of now.
            history: the cards' last readings.
            heartbeat: what a watch of the event loop has to say, None if nothing. It is shown by
                /healthz and never fails it: a loop that answers is not stuck.
        """
        self._metrics = metrics
        self._status = status
        self._unready = unready
        self._history = history
        self._heartbeat = heartbeat
        self._routes: Mapping[str, Callable[[str, bool], Answer]] = {
            "/": self._page,
            "/status.json": self._as_json,
            "/metrics": self._for_prometheus,
            "/healthz": self._alive,
            "/readyz": self._ready,
        }
        self._made: tuple[Answer, Answer] | None = None
        """The status page made last, as it is and compressed."""
        self._made_at = 0.0
        """When: `time.monotonic`."""
        self._failing: set[str] = set()
        """Paths whose last answer failed."""

    def answer(self, method: str, path: str, *, accept: str = "", encodings: str = "") -> Answer:
        """The answer to a request.

        Args:
            method: GET and HEAD are answered alike: for HEAD, leaving out the body is up to the
                caller.
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
            found = route(accept, takes_gzip(encodings))
        except Exception:  # the edge: the other pages, and the connection, go on
            if path not in self._failing:
                log.exception("a page could not be made", path=path)
            self._failing.add(path)
            return _of(
                "internal error: see the agent's log\n", _PLAIN, HTTPStatus.INTERNAL_SERVER_ERROR
            )
        self._failing.discard(path)
        return found

    def _for_prometheus(self, accept: str, zipped: bool) -> Answer:
        openmetrics = wants_openmetrics(accept)
        headers = {
            "Content-Type": OPENMETRICS if openmetrics else TEXT,
            "Vary": "Accept, Accept-Encoding",
        }
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return Answer(body=self._metrics(openmetrics=openmetrics, gzip=zipped), headers=headers)

    def _alive(self, _: str, __: bool) -> Answer:
        said = self._heartbeat()
        return _of(f"ok, but: {said}\n" if said else "ok\n", _PLAIN)

    def _ready(self, _: str, __: bool) -> Answer:
        unready = self._unready()
        state = HTTPStatus.SERVICE_UNAVAILABLE if unready else HTTPStatus.OK
        return _of(_json({"ready": not unready, "reasons": list(unready)}), _JSON, state)

    def _as_json(self, _: str, zipped: bool) -> Answer:
        found = _of(_json(as_json(self._status())), _JSON)
        return _zipped(found) if zipped else found

    def _page(self, _: str, zipped: bool) -> Answer:
        now = time.monotonic()
        if self._made is None or now - self._made_at > _FRESH:
            html = page(self._status(), self._history.of, now)
            plain = _of(html, _HTML, more=_PAGE_HEADERS)
            self._made, self._made_at = (plain, _zipped(plain)), now
        return self._made[1] if zipped else self._made[0]


_PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


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
    vary = {**plain.headers, "Vary": "Accept-Encoding"}
    if len(plain.body) < _WORTH_IT:
        return Answer(status=plain.status, body=plain.body, headers=vary)
    return Answer(
        status=plain.status,
        body=gzip.compress(plain.body, compresslevel=1),
        headers={**vary, "Content-Encoding": "gzip"},
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
