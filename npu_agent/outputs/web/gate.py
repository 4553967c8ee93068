"""Which new connections a listener takes: a pure count of what is open, and of how fast they come.

One that comes too fast is refused. Where too many are open, the one whose client has been silent
longest makes room: idle and slow clients, however many, keep no other away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_ADDRESSES = 1024
"""Remote addresses whose rate is remembered; beyond, those that came first are forgotten."""


REASONS = ("address_rate", "address_open", "rate", "open")
"""Why connections are refused, or ended for new ones: too many of one address, or of all, come or
are open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many connections a listener has open, and how many it takes in a second."""

    most: int
    """Open ones."""
    most_each: int
    """Open ones of one remote address."""
    rate: float
    """New ones a second, in the long run."""
    rate_each: float
    """New ones a second of one remote address, in the long run."""
    seconds: float = 2.0
    """So many seconds' worth of new ones may come at the same time."""
    silence: float
    """Seconds a client may take to send a request, the first or the next. aiohttp counts from the
    connection or the last answer, so that a client that sends a byte now and then gains nothing."""


PUBLIC = Bounds(most=64, most_each=16, rate=200.0, rate_each=50.0, silence=30.0)
"""Of the port that everybody may ask. A scraper has one connection, a browser up to six."""
PROBES = Bounds(most=64, most_each=4, rate=200.0, rate_each=10.0, silence=2.0)
"""Of the port that the kubelet asks, on a new connection for each probe."""


class Pace:
    """How fast clients come: so many a second, of all addresses and of each."""

    def __init__(self, *, rate: float, rate_each: float, seconds: float) -> None:
        """As `Bounds` has it. Nobody has come yet."""
        self._rate = rate
        self._rate_each = rate_each
        self._seconds = seconds
        # What is used up is kept as the time until which it is, so that no clock has to tick.
        self._all = 0.0
        self._each: dict[str, float] = {}
        """Who came last is last."""

    def against(self, address: str, now: float) -> str:
        """Why one more from `address` is too many, or ""; `now` never goes back."""
        ahead = self._each.get(address, now) - now
        if ahead > self._seconds:
            return "address_rate"
        # As much again is for those who have used up nothing: a probe now and then.
        most = self._seconds if ahead > 0 else 2 * self._seconds
        return "rate" if self._all - now > most else ""

    def take(self, address: str, now: float) -> bool:
        """Counts one from `address`, unless that is too many."""
        if self.against(address, now):
            return False
        self._all = max(now, self._all) + 1 / self._rate
        self._each[address] = max(now, self._each.pop(address, now)) + 1 / self._rate_each
        if len(self._each) > _ADDRESSES:
            del self._each[next(iter(self._each))]
        return True


class Gate:
    """Counts the connections of one listener. `refused` is by reason."""

    def __init__(self, bounds: Bounds) -> None:
        """Nobody has come yet."""
        self.bounds = bounds
        self.refused = Counter(dict.fromkeys(REASONS, 0))
        self._open: Counter[str] = Counter()
        self._pace = Pace(rate=bounds.rate, rate_each=bounds.rate_each, seconds=bounds.seconds)

    def enter(self, address: str, now: float, make_room: Callable[[str | None], None]) -> bool:
        """Whether a new connection from `address` is taken; if so, `leave` has to follow.

        Args:
            address: the remote one, without its port.
            now: seconds of a clock that never goes back.
            make_room: ends a connection of this address, or of any (None), and calls `leave`.
        """
        if reason := self._pace.against(address, now):
            self.refused[reason] += 1
            return False
        if reason := self._full(address):
            self.refused[reason] += 1
            make_room(address if reason == "address_open" else None)
        self._pace.take(address, now)
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        """A connection from `address` has ended."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def _full(self, address: str) -> str:
        if self._open[address] >= self.bounds.most_each:
            return "address_open"
        return "open" if self._open.total() >= self.bounds.most else ""
