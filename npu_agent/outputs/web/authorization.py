"""Who may read the pages, where `metrics.authorization` is `kubernetes`: as the API server says.

A client sends a bearer token. A TokenReview says whose it is, a SubjectAccessReview whether that
user may get the path. Answers are kept for a while, so that a scraper costs the API server two
requests each two minutes, and is served on while the API server is away.
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
from npu_agent.logs import Seldom, logger
from npu_agent.outputs.web.pages import Answer, refusal
from npu_agent.text import one_line

log = logger(__name__)

RESULTS = ("allowed", "unauthenticated", "forbidden", "unavailable", "limited")
"""Of requests."""

_ALLOWED_FOR, _REFUSED_FOR = 120.0, 10.0
"""Seconds for which an answer of the API server is kept: so long lasts a right that is revoked."""
_KEPT = 256
"""Answers of each kind that are kept; who asks with many tokens pushes out refusals alone."""
_AT_ONCE = 4
"""Questions to the API server at the same time."""
_DEADLINE = 5.0
"""Seconds for its answers, and for the turn to ask it; scrapers wait 10."""
_RATE, _RATE_EACH, _SECONDS = 20.0, 2.0, 5.0
"""Requests a second that the API server is asked about, of all clients and of one address."""

_ADDRESSES = 1024
"""Remote addresses whose rate is remembered; beyond, those that came first are forgotten."""

_now = time.monotonic
HOW = "docs/monitoring.md#authorization"
"""In what a client is answered that sends no token."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is answered; None: the page."""

    result: str
    refusal: Answer | None
    until: float
    """`time.monotonic`."""


class Pace:
    """How fast clients come: so many a second, of all addresses and of each."""

    def __init__(self, *, rate: float, rate_each: float, seconds: float) -> None:
        """`seconds` worth of clients may come at the same time. No client has come yet."""
        self._rate = rate
        self._rate_each = rate_each
        self._seconds = seconds
        # What is used up is kept as the time until which it is, so that no clock has to tick.
        self._all = 0.0
        self._each: dict[str, float] = {}
        """Who came last is last."""

    def take(self, address: str, now: float) -> bool:
        """Counts one from `address`, unless that is too many; `now` never goes back."""
        ahead = self._each.get(address, now) - now
        # As much again is for those who have used up nothing: who asks now and then.
        most = self._seconds if ahead > 0 else 2 * self._seconds
        if ahead > self._seconds or self._all - now > most:
            return False
        self._all = max(now, self._all) + 1 / self._rate
        self._each[address] = max(now, self._each.pop(address, now)) + 1 / self._rate_each
        if len(self._each) > _ADDRESSES:
            del self._each[next(iter(self._each))]
        return True


class Authorizer:
    """Decides about requests; `results` counts them."""

    def __init__(self, api: Api) -> None:
        """`api` is asked apart from other calls, and by four of its eight places at most."""
        self.results = Counter(dict.fromkeys(RESULTS, 0))
        self._api = api
        self._allowed: dict[tuple[bytes, str], _Decision] = {}
        self._refused: dict[tuple[bytes, str], _Decision] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._pace = Pace(rate=_RATE, rate_each=_RATE_EACH, seconds=_SECONDS)
        self._failures = Seldom()

    async def refusal(self, authorization: str, path: str, address: str) -> Answer | None:
        """What a request is answered instead of the page; None: it may have the page.

        Args:
            authorization: the header of that name.
            path: of the page.
            address: the client's, whose questions are limited.
        """
        decision = await self._decision(authorization, path, address)
        self.results[decision.result] += 1
        return decision.refusal

    async def _decision(self, authorization: str, path: str, address: str) -> _Decision:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _unauthenticated("send a bearer token of this cluster")
        # No token is kept.
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest(), path
        if known := self._known(key):
            return known
        if not self._pace.take(address, _now()):
            text = "too many requests that the API server has to be asked about: try again\n"
            return _Decision(
                "limited", refusal(text, HTTPStatus.TOO_MANY_REQUESTS, **{"Retry-After": "5"}), 0
            )
        try:
            async with asyncio.timeout(_DEADLINE), self._turn:
                # Another request with this token may have been answered meanwhile.
                return self._known(key) or self._keep(key, await self._asked(token, path))
        except (ApiError, TimeoutError) as error:
            if self._failures.due():
                why = error if isinstance(error, ApiError) else f"no answer within {_DEADLINE:g} s"
                log.error(
                    "clients of metrics cannot be authorized",
                    reason=why,
                    left_out=self._failures.left_out,
                )
            text = (
                "the API server cannot be asked who you are and what you may read: try again; "
                "npu-agent's log has the reason\n"
            )
            return _Decision("unavailable", refusal(text, HTTPStatus.SERVICE_UNAVAILABLE), 0)

    async def _asked(self, token: str, path: str) -> _Decision:
        user = await user_of(self._api, token, deadline=_DEADLINE)
        if user is None:
            return _unauthenticated("the API server does not accept this token, or no longer")
        if await may_get(self._api, user, path, deadline=_DEADLINE):
            return _Decision("allowed", None, _now() + _ALLOWED_FOR)
        text = (
            f"{one_line(user.name)} may not get {one_line(path)}: it takes a ClusterRole with this "
            f"path in nonResourceURLs, as npu-agent-metrics is: {HOW}\n"
        )
        return _refused("forbidden", refusal(text, HTTPStatus.FORBIDDEN))

    def _known(self, key: tuple[bytes, str]) -> _Decision | None:
        found = self._allowed.get(key) or self._refused.get(key)
        return found if found and _now() < found.until else None

    def _keep(self, key: tuple[bytes, str], decision: _Decision) -> _Decision:
        for kept in (self._allowed, self._refused):
            kept.pop(key, None)
        kept = self._refused if decision.refusal else self._allowed
        kept[key] = decision
        if len(kept) > _KEPT:
            del kept[next(iter(kept))]
        return decision


def _unauthenticated(why: str) -> _Decision:
    text = f"{why} (Authorization: Bearer …): {HOW}\n"
    return _refused(
        "unauthenticated", refusal(text, HTTPStatus.UNAUTHORIZED, **{"WWW-Authenticate": "Bearer"})
    )


def _refused(result: str, answer: Answer) -> _Decision:
    return _Decision(result, answer, _now() + _REFUSED_FOR)
