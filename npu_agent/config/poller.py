"""Follows the config file while the agent runs: good changes are applied, bad ones reported."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from npu_agent import files
from npu_agent.config.compare import changes, in_force
from npu_agent.config.errors import ConfigError
from npu_agent.config.load import MAX_BYTES, Effective, of_allowed_size, parse, refusals
from npu_agent.config.rules import broken_rules
from npu_agent.config.schema import Config
from npu_agent.core.state import ConfigState
from npu_agent.core.vocabulary import Vocabulary
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.threads import DaemonThread
from npu_agent.ticks import set_within, until_tick

log = logger(__name__)

_POLL_EVERY = 1.0
"""Seconds."""
_READ_EVERY = 60.0
"""Seconds after which the content is read even if the file seems to be the same one."""
_READ_AGAIN = 5.0
"""Seconds after which a file is that could not be read."""
_SETTLE = 0.1
"""Seconds that new content has to stay the same before it is parsed: a file that is written in
place may be read half written, and half a YAML file may be good YAML."""
_DEADLINE = 2.0

_Version = tuple[int, ...] | None


class Poller:
    """Publishes the config in force and the state of its file; a bad file leaves the config."""

    def __init__(self, path: Path | None, words: Vocabulary, start: Effective) -> None:
        """A poller that has not begun.

        Args:
            path: the file; None: there is nothing to follow.
            words: the vendors', which the file may have.
            start: what the agent started with.
        """
        self.configs: Feed[Config] = Feed(start.config)
        """What is in force now."""
        self.states: Feed[ConfigState] = Feed(ConfigState(loaded_at=time.monotonic()))
        """How the file stands; published after `configs`."""
        self._path = path
        self._words = words
        self._thread = DaemonThread("npu-config")
        self._now = asyncio.Event()
        self._version: _Version = ()
        """Of the file, at the last poll; (): it was not polled yet."""
        self._judged: bytes | None = None
        """The content that was judged last; None when the file could not be read since then."""
        self._followed = False

    def read_now(self) -> None:
        """Reads the file without waiting for the next poll: what SIGHUP asks for."""
        self._now.set()

    async def run(self) -> None:
        """Follows the file until cancelled."""
        path = self._path
        if path is None:
            await asyncio.Event().wait()
            return
        while True:
            self._now.clear()
            await self._read_and_judge(path)
            await self._until_changed(path, _READ_AGAIN if self._judged is None else _READ_EVERY)

    async def _until_changed(self, path: Path, longest: float) -> None:
        """Returns when the file may have other content, or after `longest` seconds.

        The links of a ConfigMap lead to another file after each change, and a file that is edited
        gets another time or length. A read now and then finds what these do not show.
        """
        until = time.monotonic() + longest
        while time.monotonic() < until:
            if await set_within(self._now, until_tick(_POLL_EVERY)):
                return
            with contextlib.suppress(TimeoutError):  # while it hangs, nothing is known
                version = await self._thread.call(partial(_version, path), deadline=_DEADLINE)
                if version != self._version:
                    self._version = version
                    return

    async def _read_and_judge(self, path: Path) -> None:
        try:
            with refusals(path):
                data = await self._read(path)
                if data == self._judged:
                    return
                await asyncio.sleep(_SETTLE)
                if data != await self._read(path):
                    return  # still being written: the next poll finds it complete
        except ConfigError as error:
            self._judged = None
            self._reject(str(error))
            return
        await self._judge(data, path)

    async def _read(self, path: Path) -> bytes:
        data = await files.read(path, MAX_BYTES + 1, deadline=_DEADLINE)
        return of_allowed_size(path, data)

    async def _judge(self, data: bytes, path: Path) -> None:
        self._judged = data
        # At the start an empty file means all defaults. Later it is most likely one that an editor
        # has just cut to nothing, and must not turn the node over.
        emptied, self._followed = self._followed and not data.strip(), True
        if emptied:
            self._reject(f"{path}: the file is empty: write {{}} if all defaults are wanted")
            return
        try:
            # On a thread: a file may have thousands of items, and the kubelet waits for the loop.
            parsing = self._thread.submit(parse, data, str(path), self._words)
            wanted = (await asyncio.wrap_future(parsing)).config
        except ConfigError as error:
            self._reject(str(error))
            return
        self._apply(wanted)

    def _apply(self, wanted: Config) -> None:
        before, present = self.states.value, self.configs.value
        config = in_force(present, wanted)
        found = changes(present, wanted)
        if next(iter(broken_rules(config, self._words.families)), None):
            # The new live keys do not go with the old ones that wait: then all of it waits.
            config = present
            found = tuple(replace(change, needs_restart=True) for change in found)
        waiting = tuple(change.key for change in found if change.needs_restart)
        if before.error is not None:
            log.info("the config file is good again", file=self._path)
        for change in found:
            if not change.needs_restart:
                log.info("config changed", change=str(change))
            elif change.key not in before.waiting:
                log.warning("config change waits for a restart", change=str(change))
        self.configs.publish(config)
        self.states.publish(
            ConfigState(
                generation=before.generation + (config != present),
                loaded_at=time.monotonic(),
                rejected=before.rejected,
                waiting=waiting,
            )
        )

    def _reject(self, error: str) -> None:
        before = self.states.value
        if error == before.error:
            return
        log.error("the config file is refused and the last good one stays", error=error)
        self.states.publish(replace(before, error=error, rejected=before.rejected + 1))


def _version(path: Path) -> _Version:
    """What is another one when the file was replaced, written or made readable; None: no such file.

    A write of the same length within one step of the file system's clock, a few milliseconds, does
    not show.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size
