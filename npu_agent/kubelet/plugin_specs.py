"""CDI specs of the device plugin: on disk before a device is offered, and while it is held."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from npu_agent.core.offer import Device
from npu_agent.kubelet import cdi


class PluginSpecs:
    """The specs of the offered devices, and of those that an agent before this one has left.

    A container cannot start without its device's spec, so what is held stays. The last good file
    stays where it cannot be replaced.
    """

    def __init__(
        self, directory: Path, kinds: Collection[str] = (), *, by_cdi: bool = False
    ) -> None:
        """Reads nothing yet.

        Args:
            directory: where container runtimes read CDI specs.
            kinds: those of which an earlier agent may have left a spec.
            by_cdi: whether containers get their devices by these specs. If not, what was left goes
                once no container holds any of it.
        """
        self.unwritten: frozenset[str] = frozenset()
        """IDs of devices whose spec on disk is missing or outdated."""
        self._directory = cdi.SpecDirectory(directory)
        self._kinds = kinds
        self._by_cdi = by_cdi
        self._ends = False
        self._decided: Mapping[str, bytes] = {}
        self._published: Mapping[str, bytes] = {}
        """The same when the present devices were offered: all that can be held is in it."""
        self._read_as_owner: bool | None = None
        """Whether the node was ours when the files were read; None: not read."""

    @property
    def error(self) -> str | None:
        return self._directory.error if self._by_cdi else None

    def published(self) -> None:
        """The devices of the last `write` are offered now."""
        self._published = self._decided

    async def write(
        self, devices: Iterable[Device], held: Collection[str] | None, *, owned: bool, cards: bool
    ) -> None:
        """Writes the specs if the disk has others, or none: other programs clean up.

        Args:
            devices: what is to be offered.
            held: IDs of devices that containers hold; None: not known.
            owned: whether the node is this agent's, and not another one's with its own config.
            cards: whether the node has any.
        """
        if self._ends or (not owned and (cards or not self._by_cdi)):
            return
        if self._read_as_owner is not owned:
            self._directory.files = await self._left_behind()
            self._published = dict(self._directory.files)
            self._read_as_owner = owned
        if not (self._by_cdi or self._directory.files):
            return
        self._decided = specs = cdi.specs(
            (device for device in devices if self._by_cdi), before=self._published, held=held
        )
        await self._directory.sync(specs)
        if self._directory.error and not self._by_cdi:
            # What is left does no harm, and the agent needs no right to write there.
            self._directory.files = {}
            return
        failed = self._directory.error
        self.unwritten = cdi.missing(specs, self._directory.files) if failed else frozenset()

    async def end(self, *, remove: bool) -> None:
        """Stops writing; removes all specs if no container holds a device."""
        self._ends = True
        if remove:
            await self._directory.sync({})

    async def _left_behind(self) -> dict[str, bytes]:
        """Reads the specs of an earlier agent, by file name: its Pods may still run."""
        found = {}
        for kind in self._kinds:
            name = cdi.spec_file(kind)
            with contextlib.suppress(OSError):
                content = await self._directory.read(name)
                spec = cdi.recovered(kind, content)
                if self._by_cdi or spec == content:  # else it may be another program's
                    found[name] = spec
        return found
