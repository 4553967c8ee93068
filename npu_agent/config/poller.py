"""Follows the config file while the agent runs: the good changes are applied, the bad ones told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from npu_agent.config.compare import changes, in_force
from npu_agent.config.errors import ConfigError
from npu_agent.config.load import Effective, parse, read
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import Config
from npu_agent.feed import Feed
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.logs import logger

log = logger(__name__)

_LOOK_EVERY = 1.0
"""Seconds. The content is compared, not the inode: a ConfigMap swaps symlinks."""
_SETTLE = 0.1
"""Seconds that new content has to stand still before it is believed: a file that is written in
place is seen half done, and half a YAML file may be good YAML."""
_DEADLINE = 2.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The config as it stands.

    Attributes:
        config: in force now.
        generation: counts the configs that were in force, from 1.
        loaded_at: when the file was last found good; seconds of the wall clock.
        error: what is wrong with the file now; None if it is good.
        rejected: how many bad versions of the file there were.
        waiting: the keys whose new value waits for a restart.
    """

    config: Config
    generation: int = 1
    loaded_at: float
    error: str | None = None
    rejected: int = 0
    waiting: tuple[str, ...] = ()


class Poller:
    """Publishes the config in `states`; a bad file changes nothing but the error that is shown."""

    def __init__(
        self, path: Path | None, families: Mapping[str, tuple[int, ...]], start: Effective
    ) -> None:
        """`start` is what the agent started with; without a `path` there is nothing to follow."""
        self.states: Feed[State] = Feed(State(config=start.config, loaded_at=time.time()))
        self._path = path
        self._families = families
        self._at_once = asyncio.Event()
        self._judged: bytes | None = None
        """The content that was judged last; None when the file could not be read since then."""
        self._followed = False

    def look(self) -> None:
        """Looks at the file now: what SIGHUP asks for."""
        self._at_once.set()

    async def run(self) -> None:
        """Follows the file until cancelled."""
        if self._path is None:
            await asyncio.Event().wait()
            return
        reader = Reader("npu-config")
        try:
            while True:
                await self._once(reader, self._path)
                try:
                    async with asyncio.timeout(_LOOK_EVERY):
                        await self._at_once.wait()
                except TimeoutError:
                    continue
                self._at_once.clear()
        finally:
            reader.close()

    async def _once(self, reader: Reader, path: Path) -> None:
        try:
            data = await reader.call(lambda: read(path), deadline=_DEADLINE)
            if data == self._judged:
                return
            await asyncio.sleep(_SETTLE)
            if data != await reader.call(lambda: read(path), deadline=_DEADLINE):
                return  # still being written: the next look sees it
        except (ConfigError, HungError) as error:
            self._judged = None
            self._reject(str(error))
            return
        self._judge(data, path)

    def _judge(self, data: bytes, path: Path) -> None:
        self._judged = data
        # At the start an empty file means all defaults. Later it is most likely one that an editor
        # has just cut to nothing, and must not turn the node over.
        emptied, self._followed = self._followed and not data.strip(), True
        if emptied:
            self._reject(f"{path}: the file is empty: write {{}} if all defaults are wanted")
            return
        try:
            wanted = parse(data, str(path), self._families).config
        except ConfigError as error:
            self._reject(str(error))
            return
        self._apply(wanted)

    def _apply(self, wanted: Config) -> None:
        before = self.states.value
        config = in_force(before.config, wanted)
        found = changes(before.config, wanted)
        if next(iter(broken_rules(config, self._families)), None):
            # The new live keys do not go with the old ones that wait: then all of it waits.
            config = before.config
            found = tuple(msgspec.structs.replace(change, needs_restart=True) for change in found)
        waiting = tuple(change.key for change in found if change.needs_restart)
        if before.error is not None:
            log.info("the config file is good again", file=self._path)
        for change in found:
            if not change.needs_restart:
                log.info("config changed", change=str(change))
            elif change.key not in before.waiting:
                log.warning("config change waits for a restart", change=str(change))
        self.states.publish(
            State(
                config=config,
                generation=before.generation + (config != before.config),
                loaded_at=time.time(),
                rejected=before.rejected,
                waiting=waiting,
            )
        )

    def _reject(self, error: str) -> None:
        before = self.states.value
        if error == before.error:
            return
        log.error("the config file is refused and the last good one stays", error=error)
        self.states.publish(
            msgspec.structs.replace(before, error=error, rejected=before.rejected + 1)
        )
