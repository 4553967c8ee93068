"""Who holds what: the kubelet's pod-resources API, read and decoded off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from npu_agent.feed import Feed
from npu_agent.logs import logger

log = logger(__name__)

_LIST = "/v1.PodResourcesLister/List"
_DEADLINE = 5.0
SETTLED = 1.0
"""Seconds after an Allocate from which on an answer knows of it: the kubelet notes a device as held
when it has the plugin's answer."""
_AT_LEAST = 0.1
"""Seconds between two times, whoever asks: the kubelet takes 100 a second from all of a node."""


class UnavailableError(Exception):
    """The kubelet did not say who holds what; the message says why, and how to mend it."""


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """A device that a container holds."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str
    """The device's ID, as the plugin advertised it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What is known of who holds what."""

    assignments: tuple[Assignment, ...] = ()
    """As the kubelet said last."""
    asked_at: float = 0.0
    """When it was asked last, `time.monotonic`; 0 before the first answer or failure."""
    error: str | None = None
    """Why the last time brought no answer."""


class _Raw(bytes):
    """A message left undecoded, in the form that grpclib's codec asks for."""

    @classmethod
    def FromString(cls, data: bytes) -> _Raw:  # noqa: N802 (protobuf's name)
        return cls(data)

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self


def socket_beside(plugin_dir: Path) -> Path:
    """The kubelet's pod-resources socket: beside its device-plugins directory."""
    return plugin_dir.parent / "pod-resources" / "kubelet.sock"


async def fetch(socket: Path) -> tuple[Assignment, ...]:
    """Asks the kubelet once; the answer is sorted.

    Raises:
        UnavailableError: the socket is missing, or the kubelet does not answer within 5 s.
    """
    return await _decoded(socket, await _answer(socket))


class PodResources:
    """Keeps `holdings` up to date by asking the kubelet now and then, and when told to."""

    def __init__(self, socket: Path, interval: Callable[[], float]) -> None:
        """`interval` says how many seconds to wait between two times; it is asked each time."""
        self.holdings: Feed[Holdings] = Feed(Holdings())
        self._socket = socket
        self._interval = interval
        self._at_once = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted_by = 0.0

    def ask(self) -> None:
        """Has the kubelet asked now."""
        self._at_once.set()

    def ask_soon(self) -> None:
        """Has it asked when a container that was just given devices can be expected there.

        However many are: once a second at most.
        """
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
        last, assignments = b"", ()  # type: bytes, tuple[Assignment, ...]
        while True:
            self._at_once.clear()
            asked_at = time.monotonic()
            error: str | None = None
            try:
                answer = await _answer(self._socket)
                if answer != last:  # mostly it is the same, and decoding it is what costs
                    last, assignments = answer, await _decoded(self._socket, answer)
            except UnavailableError as trouble:
                error = str(trouble)
            before = self.holdings.value
            if error and error != before.error:
                log.warning("the kubelet does not say who holds what", reason=error)
            elif before.error and not error:
                log.info("the kubelet says again who holds what")
            self.holdings.publish(Holdings(assignments=assignments, asked_at=asked_at, error=error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval()):
                    await self._at_once.wait()
            await asyncio.sleep(max(0.0, asked_at + _AT_LEAST - time.monotonic()))


async def _answer(socket: Path) -> bytes:
    try:
        async with (
            asyncio.timeout(_DEADLINE),
            Channel(path=str(socket)) as channel,
            channel.request(_LIST, Cardinality.UNARY_UNARY, _Raw, _Raw) as stream,
        ):
            await stream.send_message(_Raw(), end=True)
            return await stream.recv_message() or b""
    except FileNotFoundError:
        raise UnavailableError(
            f"{socket} is missing: is the kubelet running, and is its directory mounted here?"
        ) from None
    except TimeoutError:
        raise UnavailableError(f"{socket}: no answer within {_DEADLINE:g} s") from None
    except GRPCError as error:
        raise UnavailableError(f"{socket}: {error.status.name}: {error.message}") from error
    except (OSError, ProtocolError, StreamTerminatedError) as error:
        raise UnavailableError(f"{socket}: {str(error) or type(error).__name__}") from error


async def _decoded(socket: Path, answer: bytes) -> tuple[Assignment, ...]:
    try:
        # 4 MiB take betterproto half a second: not on the loop, where Allocate waits.
        return await asyncio.to_thread(decode, answer)
    except ValueError as error:
        raise UnavailableError(f"{socket}: {error}") from error


def decode(answer: bytes) -> tuple[Assignment, ...]:
    """A ListPodResourcesResponse as assignments, sorted.

    Raises:
        ValueError: it is none.
    """
    from npu_agent.wire.v1 import ListPodResourcesResponse

    try:
        response = ListPodResourcesResponse().parse(answer)
    except Exception as error:  # betterproto has no error type of its own for broken input
        raise ValueError(f"not a ListPodResourcesResponse: {error}") from error
    return tuple(
        sorted(
            Assignment(pod.namespace, pod.name, container.name, devices.resource_name, id_)
            for pod in response.pod_resources
            for container in pod.containers
            for devices in container.devices
            for id_ in devices.device_ids
        )
    )
