"""Who holds what: the kubelet's pod-resources API, polled.

A kubelet before 1.34 lists Pods that have ended too; their devices are given back before it
answers, except just after its own start, when it does not know its Pods yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from npu_agent.core.claim import ClaimUse
from npu_agent.core.ledger import SETTLED, Assignment, DeviceName
from npu_agent.feed import Feed
from npu_agent.kubelet import decode as decoder
from npu_agent.kubelet.pods import Pods
from npu_agent.kubelet.rpc import Caller
from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)

_LIST = "/v1.PodResourcesLister/List"
_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
_DEADLINE = 5.0
_SELDOM = 15.0
"""Seconds between two times while there can be no news but that the kubelet does not answer, or
that another plugin has handed out the same cards."""
_AT_LEAST = 0.1
"""Seconds between two times, whoever asks: the kubelet takes 100 a second from all of a node."""

_LARGEST = 8 << 20
"""Bytes of an answer; 250 Pods with 8 devices each are 0.2 MiB.

The container may use 128 MiB, of which the agent needs up to 50. Answer after answer of this size,
with `decode.MOST` devices in each, take 60 more at their peak (measured): two answers 16,
what grpclib holds of one at a time 4 (its window), the devices before and after they are sorted,
together with the previous ones, 15, and the rest is memory in use only in part.
"""


class UnavailableError(Exception):
    """The kubelet did not say who holds what; the message says why, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What is known of who holds what."""

    # First: it differs between any two values, so that comparing them is cheap.
    asked_at: float = 0.0
    """When the kubelet was asked last, `time.monotonic`; 0 before the first answer or failure."""
    assignments: tuple[Assignment, ...] = ()
    """As the kubelet said last."""
    claim_uses: tuple[ClaimUse, ...] = ()
    """As the kubelet said last; sorted, each one once."""
    pods: Mapping[DeviceName, frozenset[str]] = field(default_factory=dict)
    """The UIDs of the Pods that have each device, as the kubelet has noted them."""
    living: frozenset[str] = frozenset()
    """Those of the `PodResources.suspects` whose containers run."""
    error: str | None = None
    """Why the last time brought no answer."""


_Known = tuple[tuple[Assignment, ...], tuple[ClaimUse, ...]]


def socket_beside(plugin_dir: Path) -> Path:
    """The kubelet's pod-resources socket: beside its device-plugins directory."""
    return plugin_dir.parent / "pod-resources" / "kubelet.sock"


async def fetch(socket: Path, drivers: Collection[str] = ()) -> tuple[Assignment, ...]:
    """Asks the kubelet once; the answer is sorted.

    Args:
        socket: the kubelet's.
        drivers: DRA drivers of whose claims the devices are wanted too. A container that names one
            request of a claim is shown with all devices of the claim, as the kubelet lists them.

    Raises:
        UnavailableError: the socket is missing, the kubelet does not answer within 5 s, or its
            answer is broken, too large, or not read within another 5 s.
    """
    with closing(Caller(socket)) as kubelet:
        answer = await _answer(kubelet, _LIST)
    assignments, uses = await _decoded(socket, answer)
    claimed = (
        Assignment(one.namespace, one.pod, one.container, one.driver, one.device, one.claim_name)
        for one in uses
        if one.driver in drivers
    )
    return tuple(sorted({*assignments, *claimed}))


async def offered(socket: Path) -> Mapping[str, frozenset[str]]:
    """Asks the kubelet which devices of each resource it can hand out: their IDs.

    Raises:
        UnavailableError: as `fetch`, or this kubelet does not tell.
    """
    with closing(Caller(socket)) as kubelet:
        answer = await _answer(kubelet, _ALLOCATABLE)
    try:
        return decoder.allocatable(answer)
    except ValueError as error:
        raise UnavailableError(f"{socket}: {error}") from error


class PodResources:
    """Keeps `holdings` up to date by asking the kubelet now and then, and on request."""

    def __init__(self, socket: Path, interval: Feed[float], pods: Pods | None = None) -> None:
        """Nobody is asked yet.

        Args:
            socket: the kubelet's.
            interval: how many seconds to wait between two requests.
            pods: those that live although the kubelet no longer lists them; None: there are none.
        """
        self.holdings: Feed[Holdings] = Feed(Holdings())
        self.pods = pods
        self.suspects: Callable[[Holdings], Collection[str]] = lambda _: ()
        """The UIDs of Pods of which it matters, after an answer, whether they live."""
        self.no_news: Callable[[], bool] = lambda: False
        """Whether nobody holds anything that could end. Of a grant the caller of `ask_soon` knows
        already."""
        self._socket = socket
        self._interval = interval
        self._at_once = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted_by = 0.0
        self._unnoted = 2
        """For how many answers the kubelet's notes are still to be read: it writes them after it
        lists a device, and has containers there that it never lists."""

    def ask(self) -> None:
        """Has the kubelet asked now."""
        self._at_once.set()

    def ask_soon(self) -> None:
        """Has it asked when a container that was just given devices can be expected there.

        However many are: once a second at most.
        """
        self._unnoted = 2
        self._wanted_by = time.monotonic() + SETTLED
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLED, self._soon)

    def _soon(self) -> None:
        self._timer = None
        self.ask()
        if self._wanted_by > time.monotonic():
            self.ask_soon()  # somebody was given something since: this answer may not have it

    async def run(self) -> None:
        """Asks until cancelled."""
        with closing(Caller(self._socket)) as kubelet:
            await self._follow(kubelet)

    async def _follow(self, kubelet: Caller) -> None:
        last = bytearray()
        known: _Known = (), ()
        asking = Reporter(
            log, "the kubelet does not say who holds what", "the kubelet says again who holds what"
        )
        while True:
            self._at_once.clear()
            asked_at = time.monotonic()
            error: str | None = None
            try:
                answer = await _answer(kubelet, _LIST)
                if answer != last:  # decoding it is what costs
                    last, known = answer, await _decoded(self._socket, answer)
            except UnavailableError as trouble:
                error = str(trouble)
            before = self.holdings.value
            answered = Holdings(
                assignments=known[0],
                claim_uses=known[1],
                asked_at=asked_at,
                pods=before.pods,
                living=before.living,
                error=error,
            )
            if self.pods and not error:
                answered = await self._with_pods(self.pods, answered)
            if error:
                asking.failed(error)
            else:
                asking.works()
            self.holdings.publish(answered)
            interval = self._interval.value
            if self.no_news() and not error:
                interval = max(interval, _SELDOM)
            await set_within(self._at_once, until_tick(interval))
            await asyncio.sleep(max(0.0, asked_at + _AT_LEAST - time.monotonic()))

    async def _with_pods(self, pods: Pods, answered: Holdings) -> Holdings:
        """With what is known of the Pods, after an answer."""
        if answered.assignments != self.holdings.value.assignments:
            self._unnoted = 2
        if self._unnoted:
            answered = replace(answered, pods=await pods.noted())
            if answered.pods:  # there are none as long as they cannot be read
                self._unnoted -= 1
        return replace(answered, living=await pods.living(self.suspects(answered)))


async def _answer(kubelet: Caller, method: str) -> bytearray:
    socket = kubelet.path
    try:
        async with asyncio.timeout(_DEADLINE):
            message = await kubelet.ask(method, most=_LARGEST)
    except FileNotFoundError:
        raise UnavailableError(
            f"{socket} is missing: is the kubelet running, and is its directory mounted here?"
        ) from None
    except TimeoutError:
        raise UnavailableError(f"{socket}: no answer within {_DEADLINE:g} s") from None
    except GRPCError as error:
        raise UnavailableError(f"{socket}: {error.status.name}: {error.message}") from error
    except ValueError as error:
        raise UnavailableError(f"{socket}: {error}") from error
    except (OSError, ProtocolError, StreamTerminatedError) as error:
        raise UnavailableError(f"{socket}: {str(error) or type(error).__name__}") from error
    if message is None:  # an empty list comes as an empty message
        raise UnavailableError(f"{socket}: the call ended without an answer")
    return message


async def _decoded(socket: Path, answer: bytearray) -> _Known:
    """Decodes on a thread: 8 MiB of nothing but empty fields take seconds."""
    thread = DaemonThread("npu-podresources", linger=0)
    try:
        return await thread.call(partial(_known, answer), deadline=_DEADLINE)
    except TimeoutError:
        raise UnavailableError(
            f"{socket}: an answer of {len(answer):,} bytes could not be read within {_DEADLINE:g} s"
        ) from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{socket}: {error}") from error


def _known(answer: bytearray) -> _Known:
    """What an answer says, in order.

    Raises:
        ValueError: it is no ListPodResourcesResponse.
    """
    found = tuple(_sorted(_rows(answer)))
    return (
        tuple(one for one in found if isinstance(one, Assignment)),
        tuple(one for one in found if isinstance(one, ClaimUse)),
    )


def decode(answer: bytes | bytearray) -> tuple[Assignment, ...]:
    """A ListPodResourcesResponse as assignments, sorted, each one once.

    Raises:
        ValueError: it is none.
    """
    return _known(bytearray(answer))[0]


def _rows(answer: bytearray) -> set[decoder.Row | decoder.ClaimRow]:
    try:
        return set(decoder.rows(answer))
    except ValueError as error:
        raise ValueError(f"not a ListPodResourcesResponse: {error}") from error


def _sorted(rows: Iterable[decoder.Row | decoder.ClaimRow]) -> Iterator[Assignment | ClaimUse]:
    """What the rows say, in order: the kubelet lists everything in one that changes each time."""
    of_pods: dict[tuple[str, ...], list[decoder.Row | decoder.ClaimRow]] = {}
    for row in rows:
        of_pods.setdefault(row[:2], []).append(row)
    for pod in sorted(of_pods):
        for row in sorted(of_pods[pod]):
            yield Assignment(*row) if len(row) == 5 else ClaimUse(*row)
