"""Keeps the CDI specs of a host without a kubelet true to its cards.

For `npu-agent run --no-kubelet` and `npu-agent cdi watch`; what is in the specs is decided by
`npu_agent.outputs.cdi.host_specs`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from npu_agent import files
from npu_agent.backoff import Backoff
from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed, changes_of
from npu_agent.logs import logger
from npu_agent.outputs.cdi import HostSpecs, host_specs

log = logger(__name__)


class HostCdi:
    """Writes the specs whenever they change, and removes that of a vendor without cards.

    They stay when the agent ends: what is written there is true as long as no card changes.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        widths: Mapping[str, Collection[int]],
        disabled: Feed[frozenset[str]],
        directory: Path,
    ) -> None:
        """Nothing is written before `run`.

        Args:
            snapshots: the cards, best without readings, which are of no interest here.
            widths: for each family, how many cores a device can have.
            disabled: names of cards to be left out.
            directory: where the container runtimes of the host read specs.
        """
        self.written: HostSpecs | None = None
        """What was written last."""
        self.error: str | None = None
        """Why the specs cannot be written; None while nothing is wrong."""
        self._snapshots = snapshots
        self._widths = widths
        self._disabled = disabled
        self._directory = directory

    async def run(self) -> None:
        """Follows the cards until cancelled; what could not be written is tried again."""
        pause = Backoff(first=0.5, longest=30.0)
        async for _ in changes_of(self._snapshots, self._disabled):
            while (wanted := self._wanted()) and wanted != self.written:
                try:
                    await self._write(wanted)
                except OSError as error:
                    self._failed(error)
                    await self._changed_or_after(pause.next())
                else:
                    pause.reset()
                    self._done(wanted)

    def _wanted(self) -> HostSpecs | None:
        """What there should be now; None as long as the cards are not known."""
        snapshot = self._snapshots.value
        if not snapshot.complete:
            return None
        return host_specs(snapshot, self._widths, self._disabled.value)

    async def _write(self, wanted: HostSpecs) -> None:
        before = self.written.files if self.written else {}
        await write(self._directory, wanted, remove=before.keys() - wanted.files.keys())

    async def _changed_or_after(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._snapshots.changed.wait(), seconds)

    def _failed(self, error: OSError) -> None:
        reason = f"{self._directory}: {error.strerror or error}"
        if reason != self.error:
            log.error("the CDI specs cannot be written", directory=self._directory, error=error)
        self.error = reason

    def _done(self, specs: HostSpecs) -> None:
        before, self.written, self.error = self.written, specs, None
        log.info("CDI specs written", directory=self._directory, devices=len(specs.names))
        for one in specs.left_out:
            if before is None or one not in before.left_out:
                log.warning("left out of the CDI specs", what=one)


async def write(directory: Path, specs: HostSpecs, *, remove: Iterable[str] = ()) -> None:
    """Puts the files in place, and removes those named.

    Raises:
        OSError: the directory cannot be made or written.
    """
    for name, content in specs.files.items():
        await files.replace(directory / name, content, durable=True)
    for name in remove:
        await files.replace(directory / name, None)
