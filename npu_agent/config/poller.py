"""Follows the config file while the agent runs: applies good changes, reports bad ones."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from npu_agent.config.load import Effective, content, parse, refusals
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import KEYS, Config
from npu_agent.config.text import as_yaml
from npu_agent.config.values import ConfigError
from npu_agent.core.state import ConfigState
from npu_agent.core.vendor import VendorSpec
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.repeats import Repeat, until_changed
from npu_agent.threads import DaemonThread
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollTiming:
    """Seconds."""

    every: float = 1.0
    """Pause between two reads."""
    settle: float = 0.1
    """For which new content has to stay the same before it is parsed: a file that is written in
    place may be read half written, and half a YAML file may be good YAML."""
    deadline: float = 2.0
    """Of one read."""
    parsing: float = 30.0
    """For a file of the largest size, which takes a second on an idle machine."""


class Poller:
    """Publishes the config in force and the state of its file; a bad file leaves the config."""

    def __init__(
        self,
        path: Path | None,
        words: VendorSpec,
        start: Effective,
        timing: PollTiming = PollTiming(),
    ) -> None:
        self.configs: Feed[Config] = Feed(start.config)
        self.states: Feed[ConfigState] = Feed(ConfigState(loaded_at=time.monotonic()))
        """The state of the file; published after `configs`."""
        self._path = path
        self._words = words
        self._timing = timing
        self._now = asyncio.Event()
        self._thread = DaemonThread()
        self._judged: bytes | None = None
        """The content that was judged last; None: what the file has now is still to be judged."""
        self._followed = False

    def read_now(self) -> None:
        """Reads the file without waiting for the next poll; for SIGHUP."""
        self._now.set()

    async def run(self) -> None:
        if self._path is None:
            await asyncio.Event().wait()
            return
        while True:
            self._now.clear()
            await self._poll(self._path)
            every = self._timing.every
            if self._judged is None:
                await set_within(self._now, until_tick(every))
                continue

            due = time.monotonic() + until_tick(every)
            ask = partial(_content, self._path)
            repeat = Repeat[bytes | None](ask=ask, expected=self._judged, every=every, due=due)
            with suppress(OSError):  # no thread: `_poll` reports it
                await until_changed(
                    self._thread,
                    [repeat],
                    deadline=self._timing.deadline,
                    until=math.inf,
                    wake=[self._now],
                )

    async def _poll(self, path: Path) -> None:
        judged = self._judged
        self._judged = None
        try:
            with refusals(path):
                data = await self._read(path)
                if data != judged:
                    await asyncio.sleep(self._timing.settle)
                    if data != await self._read(path):
                        return  # still being written: the next poll finds it complete
                    await self._judge(data, path)
        except ConfigError as error:
            self._reject(*map(str, error.problems))
        else:
            self._judged = data

    async def _read(self, path: Path) -> bytes:
        return await self._thread.call(partial(content, path), deadline=self._timing.deadline)

    async def _judge(self, data: bytes, path: Path) -> None:
        """Applies the content or reports what is wrong with it; raises OSError as the thread."""
        # At the start an empty file means all defaults. Later it is most likely one that an editor
        # has just cut to nothing, and must not turn the node over.
        emptied = self._followed and not data.strip()
        self._followed = True
        if emptied:
            self._reject(f"{path}: the file is empty: write {{}} if all defaults are wanted")
            return
        # On a thread: a file may have thousands of items, and the kubelet waits for the loop.
        parsing = partial(parse, data, str(path), self._words)
        try:
            wanted = await self._thread.call(parsing, deadline=self._timing.parsing)
        except ConfigError as error:
            self._reject(*map(str, error.problems))
        else:
            self._apply(wanted.config)

    def _apply(self, wanted: Config) -> None:
        before = self.states.value
        present = self.configs.value
        changed = [key for key in KEYS if key.value(present) != key.value(wanted)]
        live = [key for key in changed if key.live]
        config = present

        for key in live:
            config = _with_value(config, key.attributes, key.value(wanted))
        if any(broken_rules(config, self._words.families)):
            # The new live keys do not go with the old ones that wait: then all of it waits.
            live = []
            config = present

        waiting = tuple(key.name for key in changed if key not in live)
        if before.error is not None:
            log.info("the config file is good again", file=self._path)
        for key in changed:
            old = as_yaml(key.value(present))
            new = as_yaml(key.value(wanted))
            change = f"{key.name}: {old} -> {new}"
            if key in live:
                log.info("config changed", change=change)
            elif key.name not in before.waiting:
                log.warning("config change waits for a restart", change=change)
        self.configs.publish(config)
        self.states.publish(
            ConfigState(
                generation=before.generation + (config != present),
                loaded_at=time.monotonic(),
                rejected=before.rejected,
                waiting=waiting,
            )
        )

    def _reject(self, *errors: str) -> None:
        before = self.states.value
        if errors == before.errors:
            return
        now = replace(before, errors=errors, rejected=before.rejected + 1)
        log.error("the config file is refused and the last good one stays", error=now.error)
        self.states.publish(now)


def _content(path: Path) -> bytes | None:
    """The file's content; None if it cannot be read, for a reason that the next poll reports."""
    try:
        return content(path)
    except (OSError, ConfigError):
        return None


def _with_value(values: Any, attributes: tuple[str, ...], value: object) -> Any:
    first, *rest = attributes
    if rest:
        value = _with_value(getattr(values, first), tuple(rest), value)
    return replace(values, **{first: value})
