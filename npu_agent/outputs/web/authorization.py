"""Authorizes readers of pages by the API server (`metrics.authorization: kubernetes`).

A client sends a bearer token. A TokenReview says whose it is, a SubjectAccessReview whether that
user may get the path. That it may is kept for two minutes, so that a scraper costs the API server
two requests in that time, and is served for as long while the API server is away.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus

from npu_agent.kube import Api, ApiError
from npu_agent.kube.reviews import may_get, user_of
from npu_agent.logs import Reporter, logger
from npu_agent.outputs.web.routes import HttpAnswer, text_answer
from npu_agent.text import one_line

log = logger(__name__)

_RESULTS = {
    HTTPStatus.OK: "allowed",
    HTTPStatus.UNAUTHORIZED: "unauthenticated",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
    HTTPStatus.TOO_MANY_REQUESTS: "limited",
}
"""By the status of the answer, as they are counted."""
HOW = "kubectl create token ACCOUNT"
"""Makes a token for a person who tries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewTiming:
    """Seconds, and the limits that go with them."""

    allowed: float = 120.0
    """For which a client is served without asking again: so long lasts a right that is revoked."""
    deadline: float = 5.0
    """For the API server's answers, and for the turn to ask it; scrapers wait 10."""
    window: float = 5.0
    """In which an address has `questions`."""
    questions: int = 10
    """New ones about one address's clients: ever new tokens do not flood the API server."""


_AT_ONCE = 4
_MOST = 256
"""Allowed clients and paths that are remembered."""


class Authorizer:
    """Decides about requests, and counts them in `results`."""

    def __init__(self, api: Api, timing: ReviewTiming = ReviewTiming()) -> None:
        self.results = Counter(dict.fromkeys(_RESULTS.values(), 0))
        self.timing = timing
        self._api = api
        self._allowed: dict[tuple[bytes, str], float] = {}
        """Until when (`time.monotonic`), by the token's hash and the path; the oldest is first."""
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._window = 0.0
        self._questions: Counter[str] = Counter()
        self._reporter = Reporter(
            log,
            "cannot authorize clients of metrics",
            "authorizing clients of metrics works again",
        )

    async def refusal(self, authorization: str, path: str, address: str) -> HttpAnswer | None:
        refused = await self._refusal(authorization, path, address)
        self.results[_RESULTS[refused.status if refused else HTTPStatus.OK]] += 1
        return refused

    async def _refusal(self, authorization: str, path: str, address: str) -> HttpAnswer | None:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _unauthenticated("send a bearer token of this cluster")
        # No token is kept.
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest(), path
        if self._is_allowed(key):
            return None
        if self._has_asked_much(address):
            text = "too many requests with unchecked tokens: try again\n"
            return text_answer(
                text, HTTPStatus.TOO_MANY_REQUESTS, **{"Retry-After": f"{self.timing.window:.0f}"}
            )
        try:
            async with asyncio.timeout(self.timing.deadline), self._turn:
                # Another request with this token may have been answered meanwhile.
                refused = None if self._is_allowed(key) else await self._ask(token, key)
        except (ApiError, TimeoutError) as error:
            deadline = f"no answer within {self.timing.deadline:g} s"
            self._reporter.failed(error if isinstance(error, ApiError) else deadline)
            text = (
                "cannot check your token at the API server: try again; npu-agent's log has the "
                "reason\n"
            )
            return text_answer(text, HTTPStatus.SERVICE_UNAVAILABLE)
        self._reporter.works()
        return refused

    async def _ask(self, token: str, key: tuple[bytes, str]) -> HttpAnswer | None:
        path = key[1]
        deadline = self.timing.deadline
        user = await user_of(self._api, token, deadline=deadline)
        if user is None:
            return _unauthenticated("the API server does not accept this token, or no longer")
        if not await may_get(self._api, user, path, deadline=deadline):
            text = (
                f"{one_line(user.name)} may not get {one_line(path)}: bind a ClusterRole with this "
                "path in nonResourceURLs to it, such as npu-agent-metrics\n"
            )
            return text_answer(text, HTTPStatus.FORBIDDEN)
        self._allowed.pop(key, None)
        self._allowed[key] = time.monotonic() + self.timing.allowed
        if len(self._allowed) > _MOST:
            del self._allowed[next(iter(self._allowed))]
        return None

    def _is_allowed(self, key: tuple[bytes, str]) -> bool:
        return time.monotonic() < self._allowed.get(key, 0.0)

    def _has_asked_much(self, address: str) -> bool:
        now = time.monotonic()
        if now - self._window >= self.timing.window:
            self._window = now
            self._questions.clear()
        if self._questions[address] >= self.timing.questions:
            return True
        self._questions[address] += 1
        return False


def _unauthenticated(why: str) -> HttpAnswer:
    text = f"{why} (Authorization: Bearer …), such as one of `{HOW}`\n"
    return text_answer(text, HTTPStatus.UNAUTHORIZED, **{"WWW-Authenticate": "Bearer"})
