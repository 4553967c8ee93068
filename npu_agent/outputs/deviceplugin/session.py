"""Serves and registers one resource at the kubelet, again after each loss.

The kubelet never dials again: after any loss only a new Register brings a resource back
(docs/dev/kubelet.md). At a rollout it has our devices before the agent before us ends
(`Session._register_early`): a Pod that is admitted when it has none fails for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from npu_agent import text
from npu_agent.backoff import Backoff
from npu_agent.core.state import SessionPhase
from npu_agent.feed import Feed
from npu_agent.kubelet import KUBELET_SOCKET
from npu_agent.kubelet.allocator import Allocator
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.registration import RegistrationTracker
from npu_agent.kubelet.rpc import UNANSWERED, GRPCError, UnixServer, ask, sweep, wait_drained
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.logs import logger
from npu_agent.outputs.deviceplugin.service import DevicePlugin, Devices, options
from npu_agent.ticks import until_tick

log = logger(__name__)

API_VERSION = "v1beta1"
_REGISTER = "/v1beta1.Registration/Register"

_FAILS = ".none"
"""The ending of a socket for a registration that is to fail: no longer than that of a plugin's."""
_SUFFIX = r"-[0-9a-f]{8}\.(sock|none)"
"""What follows `Plugin.socket_name` in the name of a plugin's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTiming:
    """Seconds.

    A kubelet that returns has us again within `retry_longest` and a Register: less than 2 s.
    """

    register: float = 15.0
    """Deadline of Register. The kubelet dials us for up to 10 s before it answers."""
    connect: float = 5.0
    """Longest time from Register's answer to the kubelet's ListAndWatch."""
    socket_check: float = 1.0
    """Pause between checks of our socket while registered; a stat each."""
    verify_interval: float = 20.0
    """Pause between checks that the kubelet still offers our devices."""
    verify_confirm: float = 10.0
    """Pause before the second check if it does not: a new list takes moments."""
    verify_backoff_max: float = 1200.0
    """Pause between these checks if registering again did not help."""
    retry_first: float = 0.1
    """Pause between the first attempts while the kubelet is away; a stat each."""
    retry_longest: float = 1.0
    flap_backoff_max: float = 1.5
    """Pause between registrations at a kubelet that keeps dropping us."""
    steady: float = 5.0
    """Shortest registration that counts as a success."""
    handover_deadline: float = 5.5
    """Deadline to register while the previous agent still serves; it waits for 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The registered plugin."""

    resource: str
    directory: Path
    socket_name: str
    """The beginning of our socket's name."""
    by_cdi: bool = False
    """Whether containers get their nodes by CDI names."""


class Session:
    """Keeps one resource registered; `status` has its state."""

    def __init__(
        self,
        plugin: Plugin,
        allocator: Allocator,
        ownership: Ownership,
        timing: SessionTiming = SessionTiming(),
    ) -> None:
        self.timing = timing
        self._tracker = RegistrationTracker(plugin.resource)
        self.status = self._tracker.status
        self._config = plugin
        self._resource = plugin.resource
        self._allocator = allocator
        self._devices = allocator.devices[plugin.resource]
        self._directory = plugin.directory
        self._ownership = ownership
        self._kubelet = plugin.directory / KUBELET_SOCKET
        self._proofs = Backoff(
            first=self.timing.verify_interval,
            longest=self.timing.verify_backoff_max,
            least=self.timing.verify_interval,
        )
        self._lost = False
        self._early: tuple[UnixServer, contextlib.AsyncExitStack] | None = None
        """What the kubelet has had since before the node was ours, and what ends it."""
        self._plugin = DevicePlugin(plugin.resource, self._devices, allocator, by_cdi=plugin.by_cdi)
        self.counts = self._plugin.counts

    async def run(self) -> None:
        """Serves until cancelled; then ends its stream, so that the kubelet sees it."""
        pause = Backoff(first=self.timing.retry_first, longest=self.timing.retry_longest)
        try:
            while True:
                try:
                    await self._until_cards()
                    async with self._ownership.held(
                        self._tracker.waits_for, self._register_early
                    ) as still_ours:
                        sweep(self._directory, re.escape(self._config.socket_name) + _SUFFIX)
                        await self._allocator.renew()
                        await self._hold(still_ours)
                    pause.reset()
                except OSError as error:
                    self._tracker.fails(_explained(error, self._directory))
                    await asyncio.sleep(pause.next())
                finally:
                    if self._early:
                        _, stack = self._early
                        self._early = None
                        await stack.aclose()
        finally:
            self._tracker.becomes(SessionPhase.ENDED)

    async def idle(self) -> None:
        await self._plugin.allocating.until(lambda calls: not calls)

    async def _until_cards(self) -> None:
        """An empty list is of no use to the kubelet."""
        if not self._devices.value:
            self._tracker.becomes(SessionPhase.NO_CARDS)
        await self._devices.until(bool)

    async def _hold(self, still_ours: Callable[[], bool]) -> None:
        """Serves while the resource is ours: on a new socket after each loss."""
        first = self.timing.retry_first
        loop = asyncio.get_running_loop()
        fickle = Backoff(first=first, longest=self.timing.flap_backoff_max, least=first)
        while still_ours():
            async with self._server() as server:
                if not await self._register_until_served(server):
                    continue
                since = loop.time()
                lost = await self._until_lost(server)
                self._lost = True
                self._allocator.kubelet_lost()
                log.warning(
                    "lost the kubelet; registering again", resource=self._resource, reason=lost
                )
                self._tracker.becomes(SessionPhase.REGISTERING, lost)
            if loop.time() - since > self.timing.steady:
                fickle.reset()
            # Never immediately: a kubelet that has not closed the old stream yet would take the new
            # registration for the old one and drop it (`runClient`, see `ownership`).
            await asyncio.sleep(fickle.next())

    async def _register_early(self) -> None:
        """Registers with the kubelet while the previous agent still serves.

        When that one's stream ends, the kubelet drops its present client and all devices with it
        (`runClient`). So it must have none: a registration that fails makes it forget the client,
        but not the devices nor where to allocate them (`connectClient`). `_register_until_served`
        makes us the client again. If a kubelet does otherwise, our stream ends, and we register
        again.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.timing.handover_deadline):
                    server = await stack.enter_async_context(self._served())
                    trouble = await self._register(server)
                    if not trouble and await self._fail_to_register(server):
                        self._early = server, stack.pop_all()
            except (*UNANSWERED, ValueError) as error:
                trouble = text.reason(error)
            if trouble:
                log.info(
                    "not registered until this agent owns the node",
                    resource=self._resource,
                    reason=trouble,
                )

    async def _fail_to_register(self, server: UnixServer) -> bool:
        """Registers a plugin without methods; returns whether the kubelet refused it."""
        fails = UnixServer([], server.path.with_suffix(_FAILS))
        await fails.listen()
        try:
            await self._ask_to_register(fails.path)
        except GRPCError:
            return True
        finally:
            await fails.shutdown()
        return False

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[UnixServer]:
        """Yields the server that the kubelet has already, else a new one."""
        if self._early:
            server, stack = self._early
            self._early = None
            async with stack:
                yield server
        else:
            async with self._served() as server:
                yield server

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[UnixServer]:
        """A server of the present devices; its streams end with the context."""
        served: Feed[Devices] = Feed(self._devices.value)
        self._plugin.devices = served
        server = UnixServer([self._plugin], self._new_path())
        await server.listen()
        follow = asyncio.create_task(self._follow(served))
        try:
            yield server
        finally:
            follow.cancel()
            served.close()  # the streams return, and the kubelet sees their end
            try:
                await wait_drained(self._plugin.streams)
            finally:
                await server.shutdown()
                await asyncio.gather(follow, return_exceptions=True)

    def _new_path(self) -> Path:
        """A unique one: an instance that ends late cannot delete the socket of the one after it."""
        return self._directory / f"{self._config.socket_name}-{secrets.token_hex(4)}.sock"

    async def _follow(self, served: Feed[Devices]) -> None:
        async for devices in self._devices.watch():
            served.publish(devices)

    async def _register_until_served(self, server: UnixServer) -> bool:
        """Registers until the kubelet holds our stream; returns False if our socket vanishes."""
        absent = Backoff(first=self.timing.retry_first, longest=self.timing.retry_longest)
        while (trouble := await self._register(server)) is not None:
            self._tracker.fails(trouble, SessionPhase.REGISTERING)
            await asyncio.sleep(absent.next())
            if not server.exists():
                return False
        self.counts.returns += self._lost
        self._lost = False
        self._tracker.registered(self.status.value.registrations + 1)
        log.info("registered", resource=self._resource, endpoint=server.path.name)
        return True

    async def _register(self, server: UnixServer) -> str | None:
        """Registers and waits for the kubelet's stream; returns what went wrong, or None."""
        opened = self._plugin.opened
        before = opened.value
        try:
            self._kubelet.stat()
        except FileNotFoundError:
            return (
                f"{self._kubelet} is missing: the kubelet is not running, or uses another directory"
            )
        except OSError as error:
            return _explained(error, self._directory)
        # A kubelet from 1.37 on takes each name once: it refuses one that it is connected to, and
        # then does not notice the end of that connection (`connectClient`).
        with contextlib.suppress(FileNotFoundError):  # removed: the kubelet refuses it
            server.move(self._new_path())
        try:
            await self._ask_to_register(server.path)
        except GRPCError as error:
            return f"the kubelet refuses: {error.status.name}: {error.message}"
        except TimeoutError:
            return f"the kubelet does not answer Register within {self.timing.register:g} s"
        except ValueError as error:
            return f"the kubelet's answer is not valid: {error}"
        except UNANSWERED as error:
            return f"the kubelet does not answer: {text.reason(error)}"
        connect = self.timing.connect
        try:
            async with asyncio.timeout(connect):
                await opened.until(lambda number: number > before)
        except TimeoutError:
            return f"registered, but the kubelet asks for no devices within {connect:g} s"
        return None

    async def _ask_to_register(self, path: Path) -> None:
        request = wire.RegisterRequest(
            version=API_VERSION,
            endpoint=path.name,
            resource_name=self._resource,
            options=options(),
        )
        async with asyncio.timeout(self.timing.register):
            await ask(self._kubelet, _REGISTER, bytes(request))

    async def _until_lost(self, server: UnixServer) -> str:
        """Waits until the kubelet has dropped us; returns how that was noticed.

        A new kubelet.sock means nothing while our stream is open: newer kubelets replace it without
        a restart.
        """
        streams = self._plugin.streams
        had = max(1, streams.value)  # two, if one was opened early
        ended = asyncio.create_task(streams.until(lambda number: number < had))
        removed = asyncio.create_task(self._until_removed(server))
        replaced = asyncio.create_task(self._until_replaced())
        ways = (ended, removed, replaced)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return "its stream ended"
            if removed.done():
                return "our socket was removed"
            return replaced.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _until_removed(self, server: UnixServer) -> None:
        while server.exists():  # noqa: ASYNC110 (the kubelet sets no event)
            await asyncio.sleep(until_tick(self.timing.socket_check))

    async def _until_replaced(self) -> str:
        """Waits until the kubelet no longer offers what we serve, although our stream is open.

        If another plugin registers the resource, the kubelet silently replaces our devices, and has
        none when that plugin ends.
        """
        while True:
            await asyncio.sleep(self._proofs.next())
            if not (doubtful := await self._missing()):
                self._proofs.reset()
                continue
            await asyncio.sleep(self.timing.verify_confirm)
            if missing := doubtful & await self._missing():
                return (
                    f"it no longer offers {len(missing)} of our devices, such as {min(missing)}: "
                    "check for another plugin that registered the same resource"
                )

    async def _missing(self) -> frozenset[str]:
        """Returns the IDs of our healthy devices that the kubelet does not offer."""
        offered = await self._allocator.pod_resources.offered()
        if offered is None:
            return frozenset()
        ours = frozenset(device.id for device in self._devices.value if device.healthy)
        return ours - offered.get(self._resource, frozenset())


def _explained(error: OSError, directory: Path) -> str:
    if isinstance(error, FileNotFoundError) and not directory.exists():
        return (
            f"{directory} does not exist: mount the kubelet's device-plugins directory there, or "
            "set --plugin-dir"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return (
            f"{directory}: {error.strerror}: the agent needs uid 0 and must be able to write there "
            "(mount it without readOnly)"
        )
    if error.strerror:
        return f"{error.filename or directory}: {error.strerror}"
    return str(error)
