"""Keeps the labels in place: when to check, when to write, and how to retry."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace

from npu_agent.backoff import Backoff, spread
from npu_agent.core.hardware import Snapshot
from npu_agent.core.state import LabelState
from npu_agent.core.vendor import LabelSet
from npu_agent.feed import Feed, changes_of
from npu_agent.logs import Reporter, logger
from npu_agent.outputs.labels import compute
from npu_agent.outputs.labels.compute import Machine
from npu_agent.outputs.labels.outputs import Output, OutputError
from npu_agent.ticks import set_within

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTiming:
    """Seconds."""

    settle: float = 1.0
    """That new labels have to stay the same before they are written: a driver that is reloaded
    removes its cards one by one, and each step would be a write."""
    longest_pause: float = 60.0
    """Pause between attempts, and between writes while another program writes the same labels."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    labels: Mapping[str, str]
    incomplete: bool
    resync: float


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """The config of labels."""

    sets: Collection[LabelSet]
    resync: float
    """Seconds between checks where the Node is not watched."""


class Labeller:
    """Keeps the labels in one place; `state` has their status, `results` counts what was done."""

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        settings: Feed[LabelSettings],
        output: Output,
        seen: Feed[Mapping[str, str] | None] | None,
        machine: Callable[[], Awaitable[Machine]],
        timing: LabelTiming = LabelTiming(),
    ) -> None:
        self.state: Feed[LabelState] = Feed(LabelState(output=output.name))
        self.results: Counter[str] = Counter()
        self._snapshots = snapshots
        self._settings = settings
        self._output = output
        self._seen = seen
        self._read_machine = machine
        self._wanted: Feed[_Wanted | None] = Feed(None)
        self._timing = timing
        self._putting = Reporter(
            log, "cannot apply the labels; retrying", "labels can be applied again"
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._follow())
            await self._keep()

    async def _follow(self) -> None:
        machine = await self._read_machine()
        async for _ in changes_of(self._snapshots, self._settings):
            snapshot = self._snapshots.value
            settings = self._settings.value
            if snapshot.complete:
                labels = compute.labels(snapshot, machine, settings.sets)
                incomplete = compute.why_incomplete(snapshot) is not None
                self._wanted.publish(_Wanted(labels, incomplete, settings.resync))

    async def _keep(self) -> None:
        settle = self._timing.settle
        longest = self._timing.longest_pause
        pause = Backoff(longest=longest)
        calm = Backoff(longest=longest, least=settle)
        before: Mapping[str, str] | None = None

        while True:
            changed = self._wanted.changed
            now = self._wanted.value

            if now is None:
                await changed.wait()
                continue
            new = before is not None and now.labels != before
            if new and await set_within(changed, settle):
                continue
            try:
                await self._put(now.labels, careful=now.incomplete)
            except OutputError as error:
                self._trouble(now.labels, error)
                await asyncio.sleep(pause.next(error.retry_after))
                continue
            before = now.labels
            pause.reset()
            if self._seen is None or now.incomplete:
                await set_within(changed, spread(now.resync))
            elif not await set_within(changed, calm.next()):  # until our own write is seen
                since = time.monotonic()
                await self._until_drift(now, self._seen)
                if time.monotonic() - since > longest:
                    calm.reset()

    async def _until_drift(self, now: _Wanted, seen: Feed[Mapping[str, str] | None]) -> None:
        """Waits until other labels are wanted, or the Node lacks the wanted ones."""
        async for _ in changes_of(self._wanted, seen):
            live = seen.value
            lacks = live is not None and now.labels.items() - live.items()
            if lacks or self._wanted.value is not now:
                return

    async def _put(self, labels: Mapping[str, str], *, careful: bool) -> None:
        before = self.state.value
        # New labels are not there yet, and the API server may take its time.
        in_place = before.in_place and labels == before.labels
        self.state.publish(replace(before, labels=labels, in_place=in_place))
        done = await self._output.put(labels, careful=careful)
        self._putting.works()
        self.results.update({what: 1 for what, count in done.items() if count})
        written = done.total() - done["left"]
        if written:
            counts = ", ".join(f"{count} {what}" for what, count in done.items() if count)
            log.info("labels written", output=self._output.name, labels=counts.replace("_", " "))
        self.state.publish(
            LabelState(
                output=self._output.name,
                labels=labels,
                in_place=not done["left"],
                applied_at=time.monotonic() if written else self.state.value.applied_at,
            )
        )

    def _trouble(self, labels: Mapping[str, str], error: OutputError) -> None:
        self.results[error.kind] += 1
        self._putting.failed(error)
        self.state.publish(
            replace(self.state.value, labels=labels, in_place=False, error=str(error))
        )
