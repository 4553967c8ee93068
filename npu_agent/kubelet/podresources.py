"""Polls the kubelet's pod-resources API for the holders of devices.

A kubelet before 1.34 lists Pods that have ended too; their devices are given back before it
answers, except just after its own start, when it does not know its Pods yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from npu_agent.core.ledger import SETTLED, Assignment, DeviceName, Ledger
from npu_agent.feed import Feed
from npu_agent.kubelet.pods import MOST, Pods
from npu_agent.kubelet.rpc import UNANSWERED, Channel, GRPCError, UnixChannel, ask, call
from npu_agent.logs import Reporter, logger
from npu_agent.text import reason
from npu_agent.threads import DaemonThread
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)

T = TypeVar("T")

Listed = tuple[tuple[Assignment, ...], tuple[Assignment, ...]]

DEADLINE = 5.0
"""Seconds for the kubelet's answer, and for reading it."""
_IDLE = 3
"""Intervals between two queries while no cores are in use: each query is some three wake-ups."""
_AT_LEAST = 0.03
"""Seconds between two queries: the kubelet takes 100 a second from all of a node. A claim of
several requests waits for one."""

_LIST = "/v1.PodResourcesLister/List"
_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"


class UnavailableError(Exception):
    """pod-resources gave no answer: the reason and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The latest answer about the holders of devices."""

    # First: it differs between any two values, so that comparing them is cheap.
    asked_at: float = 0.0
    """When the kubelet was asked last, `time.monotonic`; 0: never."""
    assignments: tuple[Assignment, ...] = ()
    claim_uses: tuple[Assignment, ...] = ()
    """Devices of claims, of any vendor's driver; sorted, each one once.

    A kubelet 1.36 shows a container that names one request of a claim with all devices of the
    claim, and with extended resources by DRA, with all those of its Pod.
    """
    pods: Mapping[DeviceName, frozenset[str]] = field(default_factory=dict)
    """UIDs of the Pods that have each device, as the kubelet's checkpoint has them."""
    cgroups: Mapping[str, bool] = field(default_factory=dict)
    """Those of the `PodResources.orphan_candidates` with a cgroup, by UID: whether it has a
    process."""
    error: str | None = None


def socket_beside(plugin_dir: Path) -> Path:
    """The kubelet's pod-resources socket, next to its device-plugins directory."""
    return plugin_dir.parent / "pod-resources" / "kubelet.sock"


async def fetch(socket: Path, driver: str | None = None) -> tuple[Assignment, ...]:
    """Asks the kubelet once; the answer is sorted.

    `driver` is a DRA driver of whose claims the devices are wanted too.

    Raises:
        UnavailableError: the socket is missing, or there is no good answer in time.
    """
    assignments, uses = await _read(socket, read_list, await _answer(socket, ask(socket, _LIST)))
    return tuple(sorted((*assignments, *(use for use in uses if use.resource == driver))))


class PodResources:
    """Keeps `holdings` up to date by asking the kubelet at intervals and on request."""

    def __init__(
        self, socket: Path, interval: Feed[float], pods: Pods, ledger: Feed[Ledger]
    ) -> None:
        """Asks nothing before `run`, then every `interval` seconds while cores are in use."""
        self.ledger = ledger
        self.holdings: Feed[Holdings] = Feed(Holdings())
        self.pods = pods
        self._socket = socket
        self._interval = interval
        self._now = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        self._now.set()

    def ask_soon(self) -> None:
        """Asks when the kubelet knows of a container that was just given devices.

        What is to be asked already is not put off: a Pod may live for hardly longer.
        """
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() <= loop.time():
            self._timer = loop.call_later(SETTLED, self.ask)

    async def offered(self) -> Mapping[str, frozenset[str]] | None:
        """Returns the IDs that the kubelet can allocate, by resource; None: it does not say.

        `run` logs why.
        """
        try:
            answer = await _answer(self._socket, ask(self._socket, _ALLOCATABLE))
            return await _read(self._socket, read_allocatable, answer)
        except UnavailableError:
            return None

    async def run(self) -> None:
        # Kept open: a new connection for each query would be most of its wake-ups.
        async with UnixChannel(self._socket) as channel:
            await self._run(channel)

    async def _run(self, channel: Channel) -> None:
        last: bytes | None = None
        known: Listed = (), ()
        reporter = Reporter(
            log,
            "cannot read device assignments from the kubelet (pod-resources)",
            "device assignments from the kubelet can be read again",
        )
        while True:
            self._now.clear()
            asked_at = time.monotonic()
            before = self.holdings.value

            try:
                answer = await _answer(self._socket, call(channel, _LIST))
                if answer != last:
                    known = await _read(self._socket, read_list, answer)
                    last = answer
            except UnavailableError as trouble:
                channel.close()  # it may lead to a kubelet that hangs, or has gone
                reporter.failed(str(trouble))
                self.holdings.publish(replace(before, asked_at=asked_at, error=str(trouble)))
            else:
                reporter.works()
                answered = Holdings(
                    assignments=known[0],
                    claim_uses=known[1],
                    asked_at=asked_at,
                    pods=await self.pods.device_holders(),
                )
                cgroups = await self.pods.cgroups(self.orphan_candidates(answered))
                self.holdings.publish(replace(answered, cgroups=cgroups))
            idle = self.ledger.value.idle and not self.holdings.value.error
            pause = self._interval.value * (_IDLE if idle else 1)
            await set_within(self._now, until_tick(pause))
            await asyncio.sleep(max(0.0, asked_at + _AT_LEAST - time.monotonic()))

    def orphan_candidates(self, answer: Holdings) -> frozenset[str]:
        """Returns UIDs of Pods that may have what the answer lacks."""
        listed = {assignment.name for assignment in answer.assignments}
        return self.ledger.value.orphan_candidates(listed, answer.pods)


async def _answer(socket: Path, asking: Awaitable[bytes | None]) -> bytes:
    try:
        async with asyncio.timeout(DEADLINE):
            message = await asking
    except FileNotFoundError:
        raise UnavailableError(
            f"{socket} is missing: check that the kubelet runs and that its directory is mounted "
            "here"
        ) from None
    except TimeoutError:
        raise UnavailableError(f"{socket}: no answer within {DEADLINE:g} s") from None
    except GRPCError as error:
        raise UnavailableError(f"{socket}: {error.status.name}: {error.message}") from error
    except (*UNANSWERED, ValueError) as error:
        raise UnavailableError(f"{socket}: {reason(error)}") from error
    if message is None:  # an empty list comes as an empty message
        raise UnavailableError(f"{socket}: the call ended without an answer")
    return message


async def _read(socket: Path, read: Callable[[bytes], T], answer: bytes) -> T:
    """Decodes on a thread: a full node's answer takes 20 ms, and the largest one a second."""
    try:
        return await DaemonThread(linger=0).call(lambda: read(answer), deadline=DEADLINE)
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{socket}: the answer cannot be read: {error}") from error


# Plain reading of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), of
# the fields that name a device and its holder: betterproto takes 0.1 ms for each device, on a full
# node 4 % of a core. Field numbers: protos/podresources.proto.

_Message = dict[int, list[bytes]]
"""The contents of each length-delimited field, by its number."""


def read_list(answer: bytes) -> Listed:
    """The devices and claims in a ListPodResourcesResponse, sorted, each one once.

    The kubelet lists a device once for each near NUMA node, one of a claim once for each prepare,
    and all in an order that changes. A claim's device is known by its name: some of its CDI
    names are other devices' (kubelet 1.36). A resource with more than 4,096 allocations is left
    out: no node has so many cores, and other plugins offer hundreds of thousands of devices.

    Raises:
        ValueError: the answer is broken.
    """
    held: dict[str, set[tuple[str, ...]]] = {}
    used: set[tuple[str, ...]] = set()
    for pod in map(_message, _message(answer).get(1, ())):
        for container in map(_message, pod.get(3, ())):
            holder = _text(pod, 2), _text(pod, 1), _text(container, 1)
            for resource, id_ in _devices(container.get(2, ())):
                devices = held.setdefault(resource, set())
                if len(devices) <= MOST:
                    devices.add((*holder, resource, id_))
            used.update((*holder, *device) for device in _claimed(container.get(5, ())))
    ours = sorted(names for devices in held.values() if len(devices) <= MOST for names in devices)
    claimed = tuple(Assignment(*names) for names in sorted(used))
    return tuple(Assignment(*names) for names in ours), claimed


def read_allocatable(answer: bytes) -> dict[str, frozenset[str]]:
    """The device IDs of each resource in an AllocatableResourcesResponse; raises as `read_list`."""
    by_resource: dict[str, set[str]] = {}
    for resource, id_ in _devices(_message(answer).get(1, ())):
        by_resource.setdefault(resource, set()).add(id_)
    return {resource: frozenset(ids) for resource, ids in by_resource.items()}


def _devices(messages: list[bytes] | tuple[()]) -> Iterator[tuple[str, str]]:
    for devices in map(_message, messages):
        resource = _text(devices, 1)
        for id_ in devices.get(2, ()):
            yield resource, id_.decode()


def _claimed(messages: list[bytes] | tuple[()]) -> Iterator[tuple[str, ...]]:
    """The driver and name of each device, and the name of its claim."""
    for claim in map(_message, messages):
        # A claim that is not prepared yet has no devices, and which containers name it matters.
        for device in map(_message, claim.get(4) or [b""]):
            yield _text(device, 2), _text(device, 4), _text(claim, 2)


def _text(message: _Message, field: int) -> str:
    """Returns the text of a field: the last of several, empty if there is none."""
    return message[field][-1].decode() if field in message else ""


def _message(data: bytes) -> _Message:
    fields: _Message = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, start = _varint(data, at)
                at = start + length
                fields.setdefault(tag >> 3, []).append(data[start:at])
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other} before byte {at}")
    if at > len(data):
        raise ValueError("a field is cut off")
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    raise ValueError(f"the number before byte {at} has more than 64 bits")
