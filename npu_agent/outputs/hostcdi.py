"""Keeps the CDI specs of a host without a kubelet true to its cards (`cdi.host_specs`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from npu_agent.backoff import Backoff
from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.cdi import HostSpecs, SpecDirectory, host_specs
from npu_agent.ticks import set_within

log = logger(__name__)


class HostCdi:
    """Writes the specs whenever they change, and removes that of a kind without cards to offer.

    They stay when the agent ends: they are true as long as no card changes. What is no longer true
    at the start is removed.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        widths: Mapping[str, Collection[int]],
        kinds: Collection[str],
        disabled: Feed[frozenset[str]],
        directory: Path,
    ) -> None:
        """Writes nothing before `run`; `widths` has the core counts of a family's devices."""
        self.written: HostSpecs | None = None
        self._specs = SpecDirectory(directory, durable=True)

        def wanted(snapshot: Snapshot, disabled: frozenset[str]) -> HostSpecs | None:
            return host_specs(snapshot, widths, kinds, disabled) if snapshot.complete else None

        self._wanted = snapshots.map_with(disabled, wanted)
        """None as long as the cards are not known."""

    @property
    def error(self) -> str | None:
        return self._specs.error

    async def run(self) -> None:
        """Follows the cards; tries again what failed, or what others have changed."""
        pause = Backoff(first=0.5, longest=30.0)
        while True:
            changed, wanted = self._wanted.changed, self._wanted.value
            wait = cdi.LOOK_EVERY
            if wanted is not None:
                rewritten = await self._specs.sync(wanted.files)
                if self.error:
                    wait = pause.next()
                else:
                    pause.reset()
                    if rewritten or wanted != self.written:
                        self._log(wanted)
                        self.written = wanted
            await set_within(changed, wait)

    def _log(self, specs: HostSpecs) -> None:
        log.info("CDI specs written", directory=self._specs.path, devices=len(specs.names))
        before = self.written.left_out if self.written else ()
        for one in specs.left_out:
            if one not in before:
                log.warning("left out of the CDI specs", what=one)
