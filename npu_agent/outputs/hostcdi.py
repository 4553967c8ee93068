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
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.outputs import cdi
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
        self._directory = directory

        def wanted(snapshot: Snapshot, disabled: frozenset[str]) -> HostSpecs | None:
            return host_specs(snapshot, widths, disabled) if snapshot.complete else None

        self._wanted = snapshots.map_with(disabled, wanted)
        """What there should be; None as long as the cards are not known."""

    async def run(self) -> None:
        """Follows the cards until cancelled; what could not be written is tried again.

        So is, now and then, what somebody has removed or changed.
        """
        pause = Backoff(first=0.5, longest=30.0)
        while True:
            changed, wanted = self._wanted.changed, self._wanted.value
            wait = cdi.LOOK_EVERY
            if wanted is not None:
                before = self.written.files if self.written else {}
                gone = before.keys() - wanted.files.keys()
                try:
                    if await write(self._directory, wanted, remove=gone) or wanted != self.written:
                        self._done(wanted)
                    pause.reset()
                except OSError as error:
                    self._failed(error)
                    wait = pause.next()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await changed.wait()

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


async def write(directory: Path, specs: HostSpecs, *, remove: Iterable[str] = ()) -> bool:
    """Puts the files in place, and removes those named; returns whether it was not so already.

    Raises:
        OSError: the directory cannot be made or written.
    """
    wanted: dict[str, bytes | None] = {**dict.fromkeys(remove), **specs.files}
    changed = [
        await files.replace(directory / name, content, durable=True)
        for name, content in wanted.items()
    ]
    return any(changed)
