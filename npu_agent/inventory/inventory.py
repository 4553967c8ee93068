"""Keeps the Snapshot up to date: searches for cards, probes them, publishes changes.

Start reading at `Inventory.run`. Blocking reads are jobs of `Prober`; what they find is judged
here, on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from npu_agent import text
from npu_agent.core import trends
from npu_agent.core.changes import (
    CardChange,
    ChangeKind,
    card_changes,
    flaps,
    lost_entries,
    trend_changes,
    trend_entry,
    without_flapping,
)
from npu_agent.core.hardware import CardState, SkippedDevice, Snapshot
from npu_agent.core.identity import identify, remember
from npu_agent.core.kinds import NamedCard
from npu_agent.core.trends import TrendKind, Trends
from npu_agent.core.vendor import Entry, Vendor
from npu_agent.feed import Feed
from npu_agent.files import is_device
from npu_agent.inventory.card import Answers, CardWatch, ProbeSettings, Questions, ask
from npu_agent.inventory.uevents import KernelNews
from npu_agent.logs import Reporter, logger
from npu_agent.repeats import Repeat, until_changed
from npu_agent.threads import DaemonThread
from npu_agent.ticks import until_tick
from npu_agent.wording import ENGLISH

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

log = logger(__name__)

T = TypeVar("T")

_Key = tuple[str, int]

READ_DEADLINE = 0.5
"""Seconds for a blocking read of one card."""


@dataclass(frozen=True, slots=True)
class _Found:
    entries: tuple[Entry, ...] | None
    """The entries of the last successful search; None before it."""
    trouble: str = ""
    """Why the search fails now; cards found before may still be there."""
    host_nodes: tuple[str, ...] = ()
    """Those of `ProbeSettings.host_nodes` that are device nodes."""
    missing_nodes: tuple[str, ...] = ()
    """The others."""


class Inventory:
    """Publishes a Snapshot in `snapshots` whenever the hardware changes."""

    def __init__(
        self,
        vendor: Vendor,
        settings: Feed[ProbeSettings] | None = None,
        kernel: Feed[KernelNews] | None = None,
        restarts: Counter[str] | None = None,
        known: Mapping[str, frozenset[str]] | None = None,
        prober: Prober | None = None,
    ) -> None:
        """Searches nothing before `run`.

        Args:
            vendor: what to search for cards.
            settings: followed while it runs.
            kernel: reports cards that come and go; None: it is not heard.
            restarts: counts watches that failed, by ``watch of npu0``.
            known: earlier IDs, with `Card.identities`: a recognised card keeps its ID.
            prober: None: one with the default deadline.
        """
        self.snapshots: Feed[Snapshot] = Feed(Snapshot())
        self.hardware = self.snapshots.map(Snapshot.without_readings)
        self.trends: Feed[Trends] = Feed(Trends())
        """The trends of cards; never older than `snapshots`."""
        self.degraded = self.trends.map(trends.degraded)
        self._vendor = vendor
        self._settings = settings or Feed(ProbeSettings())
        self._kernel = kernel or Feed(KernelNews())
        self._restarts = restarts if restarts is not None else Counter()
        self.recorded = self._known = dict(known or {})
        """The cards of an earlier agent: their identities, by ID."""
        self._prober = prober or Prober()
        self._watches: dict[_Key, CardWatch] = {}
        self._hung: dict[_Key | None, Job[Any] | Repeat[Any]] = {}
        """What missed its deadline and has not come back, by card; None: the search. Each keeps one
        thread, so it is not asked again meanwhile."""
        self._found = _Found(None)
        self._search_at = 0.0
        self._search_again: Repeat[_Found] | None = None
        """The search, while a thread repeats it."""

    @property
    def failures(self) -> Counter[tuple[str, str, str]]:
        """Failed reads of the present cards, by family, card and how: hung, refused, nonsense."""
        return Counter(
            {
                (watch.entry.family, watch.entry.name, how): count
                for watch in self._watches.values()
                if watch.entry
                for how, count in watch.failures.items()
            }
        )

    async def run(self) -> None:
        paced = None
        heard = None
        while True:
            settings = self._settings.value
            news = self._kernel.value
            if news is not heard:
                heard = news
                self._search_soon()
            if settings is not paced:
                paced = settings
                self._search_soon()
                for watch in self._watches.values():
                    watch.hurry()
            await self._round(settings)
            self._publish()
            wake = (self._settings.changed, self._kernel.changed)
            if settings is self._settings.value and news is self._kernel.value:
                await self._until_due(settings, wake)

    async def _until_due(self, settings: ProbeSettings, wake: Sequence[asyncio.Event]) -> None:
        """Returns when the loop has something to ask, or a thread has another answer."""
        present = (watch for watch in self._watches.values() if watch.entry)
        due = min((watch.due for watch in present), default=math.inf)
        repeats: dict[Repeat[Any], _Key | None] = {
            repeat: key for key, watch in self._watches.items() for repeat in watch.repeats
        }
        if self._search_again:
            repeats[self._search_again] = None
        else:
            due = min(due, self._search_at)
        if self._hung or self.trends.value.of(TrendKind.FLAPPING):  # which end by themselves
            due = min(due, time.monotonic() + until_tick(settings.health_interval))
        repeat = await self._prober.repeat(repeats, due, wake)
        if repeat is None:
            return

        key = repeats[repeat]
        watch = None if key is None else self._watches.get(key)
        if not repeat.done:
            self._hung[key] = repeat
            if watch:
                watch.missed(self._prober.late, settings)
        elif watch:
            watch.differs(repeat)
        self._search_soon()

    def _search_soon(self) -> None:
        self._search_at = 0.0
        self._search_again = None

    async def _round(self, settings: ProbeSettings) -> None:
        self._returned()
        now = time.monotonic()
        search = self._search_job(now, settings)
        asked: dict[_Key, tuple[Questions, Job[Answers]]] = {}
        for key, watch in self._watches.items():
            if watch.entry is None or now < watch.due:
                continue
            if key in self._hung:
                watch.missed(self._prober.late, settings)
                continue
            questions = watch.questions(watch.entry, now, settings)
            asked[key] = questions, Job(partial(ask, watch.vendor, questions))
        jobs = [*([search] if search else ()), *(job for _, job in asked.values())]
        if jobs:
            await self._prober.run(jobs)
        # The search first: a card that has gone is not called unhealthy before that.
        if search and search.result is None and search.begun:
            self._hung[None] = search
        if search and search.result is not None:
            self._set_found(search.result)
            if not self._found.trouble:
                self._search_again = self._search_to_repeat(settings)
        elif None in self._hung:
            self._set_found(replace(self._found, trouble=self._prober.late))
        for key, (questions, job) in asked.items():
            if job.result is not None:
                self._answered(self._watches[key], questions, job.result, settings)
            elif job.begun:
                self._hung[key] = job
                self._watches[key].missed(self._prober.late, settings)

    def _search_job(self, now: float, settings: ProbeSettings) -> Job[_Found] | None:
        if now < self._search_at:
            return None
        if self._search_again:
            return None
        self._search_at = now + until_tick(settings.health_interval)
        if None in self._hung:
            return None
        return Job(self._searches(settings))

    def _searches(self, settings: ProbeSettings) -> Callable[[], _Found]:
        return partial(_search, self._vendor, self._found, settings.host_nodes, Path(settings.root))

    def _search_to_repeat(self, settings: ProbeSettings) -> Repeat[_Found]:
        hears_of_cards = self._kernel.value.is_open
        return Repeat(
            ask=self._searches(settings),
            expected=self._found,
            every=settings.interval if hears_of_cards else settings.health_interval,
            due=self._search_at,
        )

    def _returned(self) -> None:
        """Retries what did not answer, and forgets cards that are gone."""
        for key, job in tuple(self._hung.items()):
            if job.done:
                del self._hung[key]
                if key is None:
                    self._search_soon()
                    # Late each time is better than none.
                    if self._found.entries is None and isinstance(job, Job) and job.result:
                        self._set_found(job.result)
                else:
                    self._watches[key].hurry()
        gone = [key for key, watch in self._watches.items() if watch.entry is None]
        for key in gone:
            if key not in self._hung:  # else its return would make another thread
                del self._watches[key]

    def _answered(
        self, watch: CardWatch, asked: Questions, answers: Answers, settings: ProbeSettings
    ) -> None:
        try:
            watch.answered(asked, answers, settings)
        except Exception as error:
            part = f"watch of {asked.entry.name}"
            log.exception("a part of the agent failed; restarting it", part=part)
            self._restarts[part] += 1
            watch.crashed(error)

    def _set_found(self, search: _Found) -> None:
        if self._found.trouble and not search.trouble:
            log.info("cards can be searched for again")

        before = self._found.entries
        self._found = search
        if search.entries is None or search.entries == before:
            return
        present = {entry.key: entry for entry in search.entries}
        for key in self._watches.keys() - present.keys():
            self._watches[key].move(None)
        for key, entry in present.items():
            if key in self._watches:
                self._watches[key].move(entry)
            else:
                self._watches[key] = CardWatch(self._vendor, entry)

    def _publish(self) -> None:
        """Publishes the current state; at first only after everything was probed.

        Before the first search has succeeded there is only the trouble, for people: no Snapshot
        without cards, by which slices and condition would say that the cards are gone.
        """
        before = self.snapshots.value
        trouble = self._found.trouble
        searched = self._found.entries is not None
        if not searched and not trouble:
            return
        by_number = sorted(self._watches.items(), key=lambda item: item[0][::-1])
        ordered = [watch.view for _, watch in by_number if watch.entry]
        if not before.complete and not all(view.probed for view in ordered):
            return  # outputs see the whole picture first, not a list that grows card by card
        odd = [view.skipped for view in ordered if view.skipped]
        if trouble:
            why = f"cannot be searched for cards: {trouble}"
            odd.append(SkippedDevice(self._vendor.place, why, unread=True))
        cards = tuple(view.card for view in ordered if view.card)
        if cards == tuple(state.card for state in before.cards):
            ids = tuple(state.id for state in before.cards)
        else:
            ids = identify(cards, self._known)
            self._known = remember(self._known, cards, ids)
        after = Snapshot(
            cards=tuple(
                CardState(
                    id=id_,
                    card=view.card,
                    health=view.health,
                    reading=view.reading,
                    host_nodes=self._found.host_nodes,
                )
                for id_, view in zip(ids, (v for v in ordered if v.card), strict=True)
                if view.card and view.health
            ),
            skipped=tuple(odd),
            complete=searched,
            missing_nodes=self._found.missing_nodes,
        )
        if after != before or self.trends.value.of(TrendKind.FLAPPING):  # which ends by itself
            self._follow(before, after)
            self.snapshots.publish(after)

    def _follow(self, before: Snapshot, after: Snapshot) -> None:
        """Updates the trends, and logs changes."""
        changes = tuple(card_changes(before, after))
        earlier = self.trends.value
        policy = self._settings.value.policy

        now = trends.step(earlier, before, after, flaps(changes), time.monotonic(), policy)
        self.trends.publish(now)
        for entry in lost_entries(self.recorded, before, after):
            log.warning("card lost while no agent ran", card=entry.cards[0].name)
        _log_changes(before, after, tuple(without_flapping(changes, now)))
        _log_trends(earlier, now)


def _search(vendor: Vendor, before: _Found, host_nodes: Sequence[str], root: Path) -> _Found:
    present = tuple(node for node in host_nodes if _is_there(root, node))
    missing = tuple(node for node in host_nodes if node not in present)
    try:
        return _Found(vendor.scan(), "", present, missing)
    except OSError as error:
        trouble = text.reason(error)
    except Exception as error:  # our own fault, which must not end the thread
        log.exception("the search for cards failed")
        trouble = f"internal error: {error!r}"
    return _Found(before.entries, trouble, present, missing)


def _is_there(root: Path, node: str) -> bool:
    try:
        return is_device(root / node.lstrip("/"), root)
    except OSError:
        return False


def _log_trends(before: Trends, after: Trends) -> None:
    for kind, trend, began in trend_changes(before, after):
        card = trend.card
        entry = replace(trend_entry(kind, trend, began), cards=(NamedCard("", "card"),))
        what = ENGLISH.headline(entry)
        if began:
            log.warning(what, card=card.card.name, id=card.id, reason=ENGLISH.shown(trend.detail))
        else:
            log.info(what, card=card.card.name, id=card.id)


def _log_changes(before: Snapshot, after: Snapshot, changes: Sequence[CardChange]) -> None:
    for change in changes:
        card = change.card.card
        health = change.card.health
        was = change.before
        name = card.name
        id_ = change.card.id

        match change.kind:
            case ChangeKind.REMOVED:
                log.warning("card removed", card=name, id=id_)
            case ChangeKind.EXCHANGED if was:
                log.warning("card exchanged", card=name, id=id_, before=was.id)
            case ChangeKind.FOUND | ChangeKind.ADDED:
                log.info(
                    "card added",
                    card=name,
                    id=id_,
                    product=card.product,
                    health=health.state.value,
                    reason=health.reason,
                )
            case ChangeKind.RENUMBERED if was:
                log.warning("card renumbered", card=name, id=id_, before=was.card.name)
            case _ if was:  # its health; of a new card that has been logged
                report = log.warning if change.kind is ChangeKind.UNHEALTHY else log.info
                what = f"card {health.state.value}"
                state = was.health.state.value
                report(what, card=name, id=id_, reason=ENGLISH.reason(health), was=state)
    for entry in after.skipped:
        if entry not in before.skipped:
            log.warning("not served", entry=entry.entry, reason=entry.reason)
    if after.complete and not after.cards and (changes or not before.complete):
        log.info("no cards on this host; waiting for some")


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A blocking call that does not raise. Its thread writes `begun`, `result` and then `done`."""

    call: Callable[[], T]
    begun: bool = False
    result: T | None = None
    done: bool = False

    def run(self) -> None:
        self.begun = True
        self.result = self.call()
        self.done = True


class Prober:
    """Runs batches of blocking jobs on one worker thread, each job with a deadline.

    A job that misses it keeps its thread; the jobs after it run on threads of their own, and the
    next batch gets a new worker.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline or READ_DEADLINE
        self._worker = DaemonThread()
        self._threads = Reporter(log, "cannot probe cards: the system gives us no thread")

    @property
    def late(self) -> str:
        """The reason while a read hangs: always the same, because it is shown and compared."""
        return f"no answer within {self.deadline:g} s"

    async def repeat(
        self, repeats: Collection[Repeat[Any]], until: float, wake: Sequence[asyncio.Event]
    ) -> Repeat[Any] | None:
        """Asks on the worker until an answer differs or is late: see `until_changed`."""
        try:
            repeat = await until_changed(
                self._worker, repeats, deadline=self.deadline, until=until, wake=wake
            )
        except OSError as error:
            self._threads.failed(error)
            self._worker = DaemonThread()
            await asyncio.sleep(until_tick(1.0))
            return None
        if repeat and not repeat.done:
            self._worker = DaemonThread()
        return repeat

    async def run(self, jobs: Sequence[Job[Any]]) -> None:
        """Returns when each job is `done`, has missed its deadline, or found no thread.

        That takes two deadlines at most, however many hang.
        """
        loop = asyncio.get_running_loop()
        waiting = deque(jobs)
        futures: list[asyncio.Future[None]] = []
        try:
            futures.append(loop.run_in_executor(self._worker, _run_each, waiting))
            await asyncio.wait(futures, timeout=self.deadline)
            if not futures[0].done():
                # A job hangs, or many are slow. Those that wait must not wait for each other.
                self._worker = DaemonThread()
                try:
                    while job := _next(waiting):
                        futures.append(loop.run_in_executor(DaemonThread(), job.run))
                finally:
                    await asyncio.wait(futures, timeout=self.deadline)
            self._threads.works()
        except OSError as error:
            self._threads.failed(error)
        finally:
            for future in futures:
                future.cancel()


def _run_each(waiting: deque[Job[Any]]) -> None:
    while job := _next(waiting):
        job.run()


def _next(waiting: deque[Job[Any]]) -> Job[Any] | None:
    """Takes a job, which no other thread then runs."""
    with suppress(IndexError):
        return waiting.popleft()
    return None
