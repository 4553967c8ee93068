"""The cordons in force: from the Node's annotation, or the last good ones on disk.

An agent that starts has the cordons of the agent before it, before it has seen its Node: also
where the API server is away.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from npu_agent import files, typedjson
from npu_agent.backoff import Backoff
from npu_agent.core.cordon import Cordons, cordons, entries, first_ids
from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed, changes_of
from npu_agent.logs import Reporter, logger
from npu_agent.supervise import background
from npu_agent.ticks import set_within

log = logger(__name__)

FILE = ".npu-agent.cordoned.json"
"""In the plugin directory: the last good annotation, and the cards that its names meant first."""
_LARGEST = 2**19
"""Bytes: all annotations of an object have 256 KiB at most."""
_START = 2.0
"""Seconds that a grant waits, when the agent has just started, until the Node has been seen."""


class _Saved(msgspec.Struct, frozen=True):
    annotation: str
    first_ids: dict[str, str]
    """As `core.cordon.first_ids`."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The last good annotation, and what is wrong with the one that is there now."""

    text: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    first_ids: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""

    def after(self, text: str) -> _Known:
        """Returns the state with another annotation."""
        try:
            return replace(self, text=text, named=entries(text), unreadable="")
        except ValueError as error:
            return replace(self, unreadable=str(error))

    def of(self, snapshot: Snapshot, disabled: Collection[str]) -> _Known:
        """Returns the state with the cards that names mean for the first time."""
        names = [*self.named, *disabled]
        return replace(self, first_ids=first_ids(names, snapshot, self.first_ids))

    def encoded(self) -> bytes | None:
        if not (self.named or self.first_ids):
            return None
        return msgspec.json.encode(_Saved(self.text, dict(self.first_ids)))


def _last(directory: Path) -> _Known:
    """The cordons that an agent saved in the plugin directory; none if unreadable. May block."""
    try:
        content = files.content(directory / FILE, _LARGEST, follow=False)
        saved = typedjson.decode(content, _Saved) if content is not None else _Saved("", {})
    except (OSError, ValueError):
        return _Known()
    return _Known(first_ids=saved.first_ids).after(saved.annotation)


def last_cordons(directory: Path, snapshot: Snapshot) -> Cordons:
    """The cordons that an agent with this plugin directory keeps in force. May block."""
    last = _last(directory)
    return cordons(last.named, snapshot, first=last.first_ids)


class CordonStore:
    """Keeps `state`, the cordons in force, in step with an annotation; `cards`: by card ID."""

    def __init__(
        self,
        annotation: Feed[str | None],
        snapshots: Feed[Snapshot],
        disabled: Feed[frozenset[str]],
        directory: Path,
        start: float = _START,
    ) -> None:
        """Starts with the cordons of the previous agent. May block.

        `annotation` is the Node's: "" without one, None as long as that is not known. `disabled`
        are names that the config has of cards. `start` are the seconds for which `settled` waits.
        """
        self._known: Feed[_Known] = Feed(_last(directory))
        self.state: Feed[Cordons] = self._known.map_with(
            snapshots,
            lambda known, now: cordons(known.named, now, known.unreadable, known.first_ids),
        )
        self.cards: Feed[Mapping[str, str]] = self.state.map(lambda state: state.cards)
        self._annotation = annotation
        self._snapshots = snapshots
        self._disabled = disabled
        self._path = directory / FILE
        self._until = time.monotonic() + start
        self._seen: Feed[bool] = Feed(False)
        """Whether the annotation has been read since the start."""
        self._saving = Reporter(log, "cannot write the cordons to disk for the next agent")

    async def run(self) -> None:
        pause = Backoff(first=1.0, longest=60.0)
        async with background(self._follow()):
            while True:
                changed = self._known.changed
                known = self._known.value
                saved = await self._save(known)
                if await set_within(changed, None if saved else pause.next()):
                    pause.reset()

    async def _follow(self) -> None:
        async for _ in changes_of(self._annotation, self._snapshots, self._disabled):
            text = self._annotation.value
            known = self._known.value
            known = known if text is None else known.after(text)
            self._known.publish(known.of(self._snapshots.value, self._disabled.value))
            self._seen.publish(text is not None)

    async def settled(self) -> None:
        """Returns when the annotation is known; soon after the start in any case."""
        if not self._seen.value:
            await set_within(self._seen.changed, max(0.0, self._until - time.monotonic()))

    async def _save(self, known: _Known) -> bool:
        """Writes the cordons for the next agent; returns whether the disk has them."""
        try:
            await files.replace(self._path, known.encoded(), durable=True)
        except OSError as error:
            self._saving.failed(error.strerror or error)
            return False
        self._saving.works()
        return True
