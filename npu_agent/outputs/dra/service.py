"""The gRPC side of a DRA driver: `Claims` and a feed answer the kubelet, on two unix sockets.

One socket has the services, the other registers them (`Endpoint`). A registration lasts as long as
its socket's file, not its connection. The kubelet refuses a services' socket whose path it knows:
each instance has names of its own.

One handler serves several versions of an API: where two have the same messages, one encodes both.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from npu_agent.core.pool import ClaimRef, PoolDevice, is_uid
from npu_agent.feed import Feed
from npu_agent.kubelet.rpc import (
    Cardinality,
    Encoded,
    GRPCError,
    Handler,
    Status,
    Stream,
    UnixServer,
    count_call,
    receive_request,
    sweep,
    wait_drained,
)
from npu_agent.kubelet.wire import pluginregistration, v1alpha1
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.logs import logger
from npu_agent.outputs.dra.claims import Claims
from npu_agent.text import one_line, quoted
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)

T = TypeVar("T")

REGISTRY = "plugins_registry"
"""In the kubelet's root: its directory of registrations."""
PLUGINS = "plugins"
"""In the kubelet's root: it has a directory for each driver."""

_UNIQUE = "[0-9a-f]{12}"
"""Not a Pod's UID: below the kubelet's directory of MicroK8s that path would be too long."""
SERVICES = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)
"""What we serve, the newest first: a kubelet takes the first that it knows. A kubelet 1.36 asks
every driver for the alpha version of the health service."""

ANSWER_WITHIN = 40.0
"""Seconds. The kubelet waits for 45, and what it then writes to the Pod names no cause."""
HEARTBEAT = 10.0
"""Seconds between two lists if nothing changes: after 30 s a device is Unknown to the kubelet. A
list could ask for more, but not a kubelet 1.34, and an agent that hangs would be believed for
longer."""
_HEALTHY = v1alpha1.HealthStatus.from_string("HEALTHY")
_UNHEALTHY = v1alpha1.HealthStatus.from_string("UNHEALTHY")
_LONGEST_MESSAGE = 1024
"""Bytes about a device or a claim; a kubelet cuts what is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationState:
    """The state of the driver at the kubelet's plugin manager."""

    asked: int = 0
    """GetInfo calls so far; a second one is a restart of the kubelet."""
    notifications: int = 0
    registered: bool = False
    error: str = ""


class Registration:
    """Registers the driver with the kubelet; `state` has the kubelet's result.

    The kubelet gives up on GetInfo after a second, and comes back after up to two minutes: nothing
    is awaited here.
    """

    def __init__(self, driver: str, endpoint: Path) -> None:
        self.state: Feed[RegistrationState] = Feed(RegistrationState())
        self._driver = driver
        self._info = Encoded(
            bytes(
                pluginregistration.PluginInfo(
                    type="DRAPlugin",
                    name=driver,
                    endpoint=str(endpoint),
                    supported_versions=list(SERVICES),
                )
            )
        )

    def __mapping__(self) -> dict[str, Handler]:
        unary = Cardinality.UNARY_UNARY
        service = "/pluginregistration.Registration"
        return {
            f"{service}/GetInfo": Handler(
                self._get_info, unary, pluginregistration.InfoRequest, Encoded
            ),
            f"{service}/NotifyRegistrationStatus": Handler(
                self._notified, unary, pluginregistration.RegistrationStatus, Encoded
            ),
        }

    async def _get_info(self, stream: Stream[pluginregistration.InfoRequest, Encoded]) -> None:
        await receive_request(stream)
        await stream.send_message(self._info)
        now = self.state.value
        self.state.publish(replace(now, asked=now.asked + 1))

    async def _notified(
        self, stream: Stream[pluginregistration.RegistrationStatus, Encoded]
    ) -> None:
        status = await receive_request(stream)
        # Even if it reports a failure: an error in answer to a success would undo the registration.
        await stream.send_message(Encoded(b""))
        before = self.state.value
        now = replace(
            before,
            notifications=before.notifications + 1,
            registered=status.plugin_registered,
            error="" if status.plugin_registered else one_line(status.error or "no reason given"),
        )
        self.state.publish(now)
        if now.registered:
            log.info("registered at the kubelet", driver=self._driver, times=now.asked)
        elif now.error != before.error:
            log.error("the kubelet refuses the DRA driver", driver=self._driver, reason=now.error)


class DraPlugin:
    """Answers the kubelet's calls to prepare and unprepare claims.

    The kubelet wants exactly the UIDs that it asked for, and shows an error's text in the Pod's
    events.
    """

    def __init__(self, claims: Claims, *, deadline: float = ANSWER_WITHIN) -> None:
        """A call is cancelled after `deadline` seconds; calls are concurrent."""
        self.calls: Feed[int] = Feed(0)
        self._claims = claims
        self._deadline = deadline

    def __mapping__(self) -> dict[str, Handler]:
        unary = Cardinality.UNARY_UNARY
        return {
            f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/{method}": handler
            for version in ("v1", "v1beta1")
            for method, handler in (
                (
                    "NodePrepareResources",
                    Handler(self._node_prepare, unary, v1.NodePrepareResourcesRequest, Encoded),
                ),
                (
                    "NodeUnprepareResources",
                    Handler(self._node_unprepare, unary, v1.NodeUnprepareResourcesRequest, Encoded),
                ),
            )
        }

    async def _node_prepare(self, stream: Stream[v1.NodePrepareResourcesRequest, Encoded]) -> None:
        refs = _refs((await receive_request(stream)).claims)
        outcomes = await self._within(self._claims.prepare(refs))
        if isinstance(outcomes, str):
            outcomes = dict.fromkeys((ref.uid for ref in refs), outcomes)
        answers = {
            # An empty text would be a success to the kubelet.
            uid: v1.NodePrepareResourceResponse(error=_cut(outcome or "no reason given"))
            if isinstance(outcome, str)
            else v1.NodePrepareResourceResponse(devices=[*outcome])
            for uid, outcome in outcomes.items()
        }
        await stream.send_message(Encoded(bytes(v1.NodePrepareResourcesResponse(claims=answers))))
        await stream.send_trailing_metadata()  # a Pod waits for it; the log can wait
        for ref in refs:
            outcome = outcomes[ref.uid]
            if isinstance(outcome, str):
                log.warning("claim not prepared", claim=_name(ref), reason=outcome)
            else:
                devices = ",".join(device.device_name for device in outcome)
                log.info("claim prepared", claim=_name(ref), devices=devices)

    async def _node_unprepare(
        self, stream: Stream[v1.NodeUnprepareResourcesRequest, Encoded]
    ) -> None:
        refs = _refs((await receive_request(stream)).claims)
        error = await self._within(self._claims.unprepare(refs))
        for ref in refs:
            if error:
                log.warning("claim not unprepared", claim=_name(ref), reason=error)
            else:
                log.info("claim unprepared", claim=_name(ref))
        answers = {ref.uid: v1.NodeUnprepareResourceResponse(error=error) for ref in refs}
        await stream.send_message(Encoded(bytes(v1.NodeUnprepareResourcesResponse(claims=answers))))

    async def _within(self, change: Awaitable[T]) -> T | str:
        """Returns the result of a change, or that it took too long."""
        with count_call(self.calls):
            try:
                async with asyncio.timeout(self._deadline):
                    return await change
            except TimeoutError:
                late = f"not ready within {self._deadline:g} s; the kubelet tries again"
                return f"npu-agent was {late}"


class HealthStream:
    """Streams the health of all devices: on change, and as a heartbeat.

    The `streams` end when the feed of devices is closed: then every device's health is unknown.
    """

    def __init__(
        self,
        pool: str,
        devices: Feed[tuple[PoolDevice, ...] | None],
        *,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        """`devices` are in `pool`; while they are None, nothing is sent."""
        self.streams: Feed[int] = Feed(0)
        self._pool = pool
        self.devices = devices
        self._heartbeat = heartbeat
        self._encoded: tuple[tuple[PoolDevice, ...] | None, Encoded] = (None, Encoded(b""))
        """The last list and its message: 120 parts of cards take 20 ms to encode."""

    def __mapping__(self) -> dict[str, Handler]:
        handler = Handler(
            self._watch, Cardinality.UNARY_STREAM, v1alpha1.NodeWatchResourcesRequest, Encoded
        )
        return {
            f"/{version}.DRAResourceHealth/NodeWatchResources": handler
            for version in ("v1", "v1alpha1")
        }

    async def _watch(self, stream: Stream[v1alpha1.NodeWatchResourcesRequest, Encoded]) -> None:
        await receive_request(stream)
        with count_call(self.streams):
            while not self.devices.closed:
                changed = self.devices.changed  # before the list is read: no change is missed
                if (devices := self.devices.value) is not None:
                    await stream.send_message(self._message(devices))
                await set_within(changed, until_tick(self._heartbeat))

    def _message(self, devices: tuple[PoolDevice, ...]) -> Encoded:
        if self._encoded[0] is not devices:
            self._encoded = (devices, Encoded(self._list(devices)))
        return self._encoded[1]

    def _list(self, devices: Sequence[PoolDevice]) -> bytes:
        now = int(time.time())
        return bytes(
            v1alpha1.NodeWatchResourcesResponse(
                devices=[
                    v1alpha1.DeviceHealth(
                        device=v1alpha1.DeviceIdentifier(
                            pool_name=self._pool, device_name=device.name
                        ),
                        # A device whose health the driver does not tell can be allocated: it is
                        # reported as healthy, and the message says more.
                        health=_HEALTHY if device.device.healthy else _UNHEALTHY,
                        last_updated_time=now,
                        message=_cut(device.device.reason),
                    )
                    for device in devices
                ]
            )
        )


def _refs(claims: Sequence[v1.Claim]) -> tuple[ClaimRef, ...]:
    """The claims of a request; INVALID_ARGUMENT if a UID cannot be part of a file's name."""
    refs = tuple(
        ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid) for claim in claims
    )
    for ref in refs:
        if not is_uid(ref.uid):
            what = f"claim {_name(ref)!r} has the UID {quoted(ref.uid)}, which is none"
            raise GRPCError(Status.INVALID_ARGUMENT, what)
    return refs


def _name(ref: ClaimRef) -> str:
    return f"{ref.namespace}/{ref.name}"


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:_LONGEST_MESSAGE].decode(errors="ignore")


def made_by_us(name: str, driver: str) -> bool:
    return re.fullmatch(_registration(driver), name) is not None


def _registration(driver: str) -> str:
    return rf"{re.escape(driver)}-{_UNIQUE}-reg\.sock"


def sweep_all(driver: str, kubelet_root: Path) -> None:
    sweep(kubelet_root / REGISTRY, _registration(driver))
    sweep(kubelet_root / PLUGINS / driver, rf"dra-{_UNIQUE}\.sock")


class Endpoint:
    """A driver on two sockets that are this process's alone."""

    def __init__(
        self, *, driver: str, kubelet_root: Path, plugin: DraPlugin, health: HealthStream
    ) -> None:
        """`kubelet_root` is ``/var/lib/kubelet``, by the kubelet's own path for it."""
        unique = secrets.token_hex(6)
        self.path = kubelet_root.absolute() / PLUGINS / driver / f"dra-{unique}.sock"
        self.registration_path = kubelet_root / REGISTRY / f"{driver}-{unique}-reg.sock"
        self.plugin = plugin
        self.health = health
        self._service = UnixServer([plugin, health], self.path)
        registration = Registration(driver, self.path)
        self._registration = UnixServer([registration], self.registration_path)
        self.registration: Feed[RegistrationState] = registration.state

    async def start(self) -> None:
        """Listens: first what the kubelet will call, then where it finds that.

        Raises:
            OSError: a socket cannot be made, or its path is too long; nothing is left behind.
        """
        registry = self.registration_path.parent
        if not registry.is_dir():
            raise FileNotFoundError(
                f"{registry} is missing: check that the kubelet runs and that the directory is "
                "mounted here"
            )
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        await self._service.listen()
        try:
            await self._registration.listen()
        except BaseException:
            await self._service.shutdown()
            raise

    async def registered(self) -> None:
        """Returns when the kubelet calls this instance of the driver, and no other."""
        await self.registration.until(lambda now: now.registered)
        # It takes the newest of those that it is connected to, and connects by itself.
        await self._service.accepted.until(bool)

    def exists(self) -> bool:
        return self._service.exists() and self._registration.exists()

    async def close(self) -> None:
        """Deregisters, lets the health streams end, then closes the services; within 0.6 s.

        The caller has closed the feed of devices, so that the streams return. A call under way is
        cancelled (see `Driver.idle`). Cancelled, it waits no longer, and leaves no socket.
        """
        try:
            await self._registration.shutdown()
            await wait_drained(self.health.streams)
        finally:
            await self._service.shutdown()
