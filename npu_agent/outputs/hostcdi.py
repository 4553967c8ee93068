"""Keeps the CDI specs of a host without a kubelet true to its cards.

For `npu-agent run --no-kubelet` and `npu-agent cdi watch`; what is in the specs is decided by
`npu_agent.outputs.cdi.host_specs`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from npu_agent import files
from npu_agent.backoff import Backoff
from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed
from npu_agent.logs import Reporter, logger
from npu_agent.outputs import cdi
from npu_agent.outputs.cdi import HostSpecs, host_specs
from npu_agent.ticks import set_within

log = logger(__name__)


class HostCdi:
    """Writes the specs whenever they change, and removes that of a kind without cards to offer.

    They stay when the agent ends: what is written there is true as long as no card changes. What
    was written before it started, and is no longer true, is removed too: a card can have died with
    its host.
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
        """Nothing is written before `run`.

        Args:
            snapshots: the cards, best without readings, which are of no interest here.
            widths: for each family, how many cores a device can have.
            kinds: the kinds of CDI devices that there can be.
            disabled: names of cards to be left out.
            directory: where the container runtimes of the host read specs.
        """
        self.written: HostSpecs | None = None
        """What was written last."""
        self._writing = Reporter(log, "the CDI specs cannot be written")
        self._directory = directory

        def wanted(snapshot: Snapshot, disabled: frozenset[str]) -> HostSpecs | None:
            return host_specs(snapshot, widths, kinds, disabled) if snapshot.complete else None

        self._wanted = snapshots.map_with(disabled, wanted)
        """What there should be; None as long as the cards are not known."""

    @property
    def error(self) -> str | None:
        """Why the specs cannot be written; None while nothing is wrong."""
        return self._writing.reason

    async def run(self) -> None:
        """Follows the cards until cancelled; what could not be written is tried again.

        So is, now and then, what somebody has removed or changed.
        """
        pause = Backoff(first=0.5, longest=30.0)
        while True:
            changed, wanted = self._wanted.changed, self._wanted.value
            wait = cdi.LOOK_EVERY
            if wanted is not None:
                try:
                    if await write(self._directory, wanted) or wanted != self.written:
                        self._done(wanted)
                    self._writing.works()
                    pause.reset()
                except OSError as error:
                    self._writing.failed(f"{self._directory}: {error.strerror or error}")
                    wait = pause.next()
            await set_within(changed, wait)

    def _done(self, specs: HostSpecs) -> None:
        before, self.written = self.written, specs
        log.info("CDI specs written", directory=self._directory, devices=len(specs.names))
        for one in specs.left_out:
            if before is None or one not in before.left_out:
                log.warning("left out of the CDI specs", what=one)


async def write(directory: Path, specs: HostSpecs) -> frozenset[str]:
    """Puts the files in place, or removes them; returns the names of those that were otherwise.

    Raises:
        OSError: the directory cannot be made or written.
    """
    return frozenset(
        [
            name
            for name, content in specs.files.items()
            if await files.replace(directory / name, content, durable=True)
        ]
    )
