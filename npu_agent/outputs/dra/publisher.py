"""Keeps the node's ResourceSlices as they should be: when to check, when to write, how to retry.

The kubelet deletes the slices of its node when it starts, a Node's go with it, and other clients
may delete or change one: they are watched, and put back.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import replace

from npu_agent.backoff import ApiBackoff, Backoff
from npu_agent.core.pool import PoolDevice, whole_cards
from npu_agent.core.state import COUNTERS, TAINTS, SlicesState
from npu_agent.core.trouble import Trouble
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api, ApiError, Kind, node, resourceslices
from npu_agent.logs import logger
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.slices import Plan, Slice
from npu_agent.ticks import set_within

log = logger(__name__)

_SHORTEST, _LONGEST = 300.0, 600.0
"""Seconds that a watch is asked for, at random in between: as client-go does."""
_STEADY = 5.0
"""Seconds that a watch has to last to count as one that worked."""
_BROKEN = (Kind.UNREACHABLE, Kind.TIMEOUT)
_RESUMED = (*_BROKEN, Kind.SERVER, Kind.TOO_MANY, Kind.UNAUTHORIZED, Kind.CREDENTIALS)
"""After these a watch goes on where it was. After others, such as 410, the slices are listed."""
_GAP_FIRST, _GAP_LONGEST = 0.1, 1.0
"""Seconds between two rounds of writes, longer while one follows the other: somebody else may write
the same slices."""
_CALM = 10.0
"""Seconds without a write after which the gap is short again."""


class SlicePublisher:
    """Publishes the devices of `devices` as ResourceSlices; `state` has how that goes.

    None in `devices` says that nothing is known yet: what is there stays. So it does when the
    agent ends, as the next one goes on with it.
    """

    def __init__(
        self,
        *,
        api: Api,
        node_name: str,
        driver: str,
        devices: Feed[tuple[PoolDevice, ...] | None],
    ) -> None:
        """Starts nothing yet."""
        self.state: Feed[SlicesState] = Feed(SlicesState())
        self.in_place: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        """The devices that the API server has confirmed, and no others; None while that is not
        known."""
        self._api = api
        self._node_name = node_name
        self._driver = driver
        self._devices = devices
        self._live: Feed[Mapping[str, Slice] | None] = Feed(None)
        """By name, the slices there are; None before the first listing."""
        self._asked: Feed[int] = Feed(0)
        """How often a listing was asked for, and in `_answered` for how many there was one."""
        self._answered = 0
        self._kubelets: Feed[int] = Feed(0)
        """How often the kubelet was restarted: it ends every pause."""
        self._listing = asyncio.Lock()
        self._listed = 0
        """The version of the last listing."""
        self._seen: dict[str, int] = {}
        """By name, the version of what was noted after that listing, of a deletion too: the answer
        to a call and the events of the watch may come in either order."""
        self._uid: str | None = None
        self._generation = 1
        self._accepted: dict[str, tuple[Slice, Slice]] = {}
        """By name, what was sent last and what the API server made of it."""
        self._dropped: frozenset[str] = frozenset()
        self._tried = False
        """Whether this API server, as far as is known, was asked if it keeps counters."""
        self._logged: set[str] = set()
        self._restarted = False
        """Whether the API server may have been restarted since the last listing."""
        self._troubles: dict[str, ApiError] = {}
        """By what could not be done: ``write``, ``list`` or ``watch``."""

    def ask_now(self) -> None:
        """Has the slices listed now: the kubelet was restarted and may have deleted them."""
        self._kubelets.publish(self._kubelets.value + 1)
        self._list_again()

    @property
    def no_access(self) -> bool:
        """Whether the API server lists no slices for us: it has none, or we have no right to."""
        error = self._troubles.get("list")
        return error is not None and error.kind in (Kind.FORBIDDEN, Kind.NOT_FOUND)

    async def run(self) -> None:
        """Follows the devices and the API server until cancelled."""
        self.in_place.publish(None)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._follow())
            parts.create_task(self._write())

    # --- what there is --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Keeps `_live` true."""
        retry, loop = ApiBackoff(), asyncio.get_running_loop()
        version = ""
        while True:
            restarted = self._kubelets.changed
            doing, opened, wait = "list", math.inf, None
            try:
                if not version:
                    version = await self._list()
                    self._works("list")
                doing = "watch"
                seconds = random.uniform(_SHORTEST, _LONGEST)  # noqa: S311 (spreads load)
                async with resourceslices.watch(
                    self._api, self._node_name, self._driver, version, seconds=seconds
                ) as events:
                    opened = loop.time()
                    self._opened()
                    async for event in events:
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            self._see(event["object"], gone=event["type"] == "DELETED")
            except ApiError as error:
                wait, broken = error.retry_after, error.kind in _BROKEN
                self._restarted |= broken
                if error.kind not in _RESUMED:
                    version = ""
                # A watch that breaks, or begins with too old a version, is no trouble as long as
                # the next one can be opened.
                if error.status != 410 and not (broken and opened < math.inf):
                    self._failed(doing, error)
            else:
                if loop.time() - opened < _STEADY:
                    version = ""  # a proxy may end each watch before there is any event
            if loop.time() - opened > _STEADY:
                retry.reset()
            if await set_within(restarted, retry.next(wait)):
                retry.reset()

    def _opened(self) -> None:
        """The API server answers with events."""
        self._works("watch")
        if not self._restarted:
            return
        # It may be another one now, with other features: what it drops is found again.
        self._restarted = self._tried = False
        if self._dropped or any(one.counters for one in self._devices.value or ()):
            self._dropped = frozenset()
            self._accepted.clear()
            self._list_again()

    def _list_again(self) -> None:
        self._asked.publish(self._asked.value + 1)

    async def _list(self) -> str:
        """Lists the slices; returns the version from which on they have to be watched."""
        async with self._listing:  # one after the other, so that the last one is the newest
            listing = await resourceslices.read(self._api, self._node_name, self._driver)
        self._listed = _number(listing.resource_version)
        # What an event or the answer to a call has said in the meantime may be newer.
        self._seen = {name: at for name, at in self._seen.items() if at > self._listed}
        live = {name: each for name, each in listing.slices.items() if name not in self._seen}
        known = self._live.value or {}
        newer = {name: each for name, each in known.items() if name in self._seen}
        self._note_live(live | newer)
        return listing.resource_version

    def _see(self, found: Slice, *, gone: bool = False) -> None:
        """Notes what an event, or the answer to a call, says of a slice."""
        name, live = found["metadata"]["name"], dict(self._live.value or {})
        version = _number(found["metadata"].get("resourceVersion"))
        if version < self._seen.get(name, self._listed):
            return  # it happened before what is known
        self._seen[name] = version
        live.pop(name, None)
        if not gone:
            live[name] = found
        self._note_live(live)

    def _note_live(self, live: Mapping[str, Slice]) -> None:
        self._live.publish(live)
        self.state.publish(replace(self.state.value, incomplete=slices.is_incomplete(live)))

    # --- what there should be -------------------------------------------------------------------

    async def _write(self) -> None:
        """Brings about what is wanted, whenever that or `_live` changes."""
        retry, gap = ApiBackoff(), Backoff(first=_GAP_FIRST, longest=_GAP_LONGEST)
        loop = asyncio.get_running_loop()
        wrote_at = -_CALM
        async for _ in changes_of(self._live, self._devices, self._asked):
            writes = self.state.value.writes
            await self._until_in_place(retry)
            if self.state.value.writes > writes:
                if loop.time() - wrote_at > _CALM:
                    gap.reset()
                wrote_at = loop.time()
                await asyncio.sleep(gap.next())

    async def _until_in_place(self, retry: ApiBackoff) -> None:
        while True:
            restarted = self._kubelets.changed
            try:
                await self._bring_about()
            except ApiError as error:
                self.state.publish(replace(self.state.value, published=False))
                self._failed("write", error)
                self._list_again()  # it may have taken effect all the same
                if await set_within(restarted, retry.next(error.retry_after)):
                    retry.reset()
            else:
                retry.reset()
                self._works("write")
                return

    async def _bring_about(self) -> None:
        """Writes what differs, if anything does.

        Raises:
            ApiError: of any kind; a part of it may have been written.
        """
        if self._answered != self._asked.value:
            asked = self._asked.value
            await self._list()
            self._answered = asked
        if self._live.value is None or self._devices.value is None:
            return
        names = {each["metadata"]["name"] for each in self._plan().apply}
        if self._uid is None or names - self._live.value.keys():
            # One that has vanished may have done so with its Node, which was created again.
            self._uid = (await node.read(self._api, self._node_name)).uid
        plan = await self._tried_plan()
        while plan.delete or plan.apply:
            self.in_place.publish(None)
            await self._execute(plan)
            plan = await self._tried_plan()  # without what the API server has dropped
        live = self._live.value or {}
        self.in_place.publish(self._devices.value)
        self.state.publish(
            replace(
                self.state.value,
                published=True,
                generation=self._generation,
                slices=len(live),
                devices=sum(len(each["spec"].get("devices") or ()) for each in live.values()),
                dropped=tuple(sorted(self._dropped)),
            )
        )

    def _publishable(self) -> tuple[PoolDevice, ...]:
        """The devices that can be offered with the features that the API server has."""
        devices = self._devices.value or ()
        if not COUNTERS.isdisjoint(self._dropped):
            # Without counters the scheduler would allocate each core several times.
            devices = whole_cards(devices)
        if TAINTS in self._dropped:
            # Without its taint a device would be allocated. Who holds it keeps it.
            devices = tuple(device for device in devices if not device.taints)
        return devices

    async def _tried_plan(self) -> Plan:
        """What to write. Before there are counters that were not there before, they are tried."""
        plan, live = self._plan(), self._live.value or {}
        counting = any(one.counters for one in self._publishable())
        if counting and (
            not self._tried
            or any(
                slices.counts(each) and not slices.counts(live.get(each["metadata"]["name"]))
                for each in plan.apply
            )
        ):
            await self._try_counters()
            plan = self._plan()
        return plan

    async def _try_counters(self) -> None:
        """Finds out whether the API server keeps counters; nothing is written.

        In a slice that has had them it keeps them even if the feature is off by now. But one that
        is new and loses them may be the one that completes a pool of devices that overlap.

        Raises:
            ApiError: of any kind.
        """
        wanted = slices.slices(self._publishable(), **self._whose(), generation=1)
        with_sets, with_devices = (
            next(each for each in wanted if key in each["spec"])
            for key in ("sharedCounters", "devices")
        )
        for each in (with_sets, with_devices):
            tried = {**each, "metadata": {"name": f"npu-agent-try-{self._driver}"}}
            try:
                reply = await resourceslices.dry_run(self._api, tried)
            except ApiError as error:
                if error.status != 422:
                    raise
                # Kubernetes 1.34 and 1.35 have had other forms of counters.
                log.warning("the API server refuses counters", error=error)
                self._note_dropped(tuple(COUNTERS))
                return
            if fields := COUNTERS.intersection(slices.dropped(tried, reply)):
                self._note_dropped(tuple(fields))
                return
        self._tried = True

    def _whose(self) -> dict[str, str]:
        return {"driver": self._driver, "node": self._node_name, "uid": self._uid or ""}

    def _plan(self) -> Plan:
        live = self._live.value or {}
        self._generation = slices.newest(live, self._generation)
        return slices.plan(
            {name: self._as_sent(name, each) for name, each in live.items()},
            self._publishable(),
            **self._whose(),
            generation=self._generation,
        )

    def _as_sent(self, name: str, live: Slice) -> Slice:
        """A slice that is as the API server has answered counts as what was sent to it."""
        sent, reply = self._accepted.get(name, (None, None))
        return sent if sent and reply and not slices.differs(live, reply) else live

    async def _execute(self, plan: Plan) -> None:
        before = self._live.value or {}
        for name in plan.delete:
            await self._delete(name)
        for wanted in plan.apply:
            sent = slices.keeping_times(wanted, before)
            reply = await resourceslices.apply(self._api, sent)
            self._accepted[sent["metadata"]["name"]] = (sent, reply)
            self._see(reply)
            self._wrote()
            fields = slices.dropped(sent, reply)
            self._note_dropped(fields)
            if not COUNTERS.isdisjoint(fields):
                return  # with the rest the pool would be complete, and its devices overlap
        log.info(
            "ResourceSlices written",
            node=self._node_name,
            slices=len(plan.apply),
            deleted=len(plan.delete),
            devices=sum(len(each["spec"].get("devices", ())) for each in plan.apply),
            generation=slices.newest({each["metadata"]["name"]: each for each in plan.apply}),
        )

    async def _delete(self, name: str) -> None:
        if await resourceslices.delete(self._api, name):
            self._wrote()
        self._accepted.pop(name, None)
        live = dict(self._live.value or {})
        if live.pop(name, None) is not None:
            self._note_live(live)

    def _wrote(self) -> None:
        self.state.publish(replace(self.state.value, writes=self.state.value.writes + 1))

    def _note_dropped(self, fields: tuple[str, ...]) -> None:
        self._dropped |= set(fields)
        if unknown := set(fields) - self._logged:
            self._logged |= unknown
            log.warning(
                "the API server drops fields of ResourceSlices: a feature gate is off there",
                fields=", ".join(sorted(unknown)),
            )

    # --- what goes wrong ------------------------------------------------------------------------

    def _failed(self, doing: str, error: ApiError) -> None:
        before = self._troubles.get(doing)
        self._troubles[doing] = error
        if before is None or before.kind is not error.kind:
            log.warning("the ResourceSlices cannot be kept", doing=doing, error=error)
        self._publish_trouble()

    def _works(self, doing: str) -> None:
        if self._troubles.pop(doing, None):
            log.info("the ResourceSlices can be kept again", doing=doing)
            self._publish_trouble()

    def _publish_trouble(self) -> None:
        trouble = None
        known = (self._troubles.get(doing) for doing in ("write", "list", "watch"))
        if error := next(filter(None, known), None):
            trouble = Trouble(what=error.what, remedy=error.remedy)
        self.state.publish(replace(self.state.value, trouble=trouble))


def _number(version: object) -> int:
    """A resourceVersion as a number: the higher one is the later one, since Kubernetes 1.35."""
    return int(version) if isinstance(version, str) and version.isdecimal() else 0
