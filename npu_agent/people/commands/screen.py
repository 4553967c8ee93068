"""Commands that go on: one loop that shows a text again, a terminal's alternate screen, the end."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from threading import current_thread, main_thread
from typing import Any, Self

from npu_agent.cli import program
from npu_agent.config import Config
from npu_agent.core.hardware import Snapshot
from npu_agent.core.trends import Trends
from npu_agent.feed import Feed
from npu_agent.inventory.inventory import Inventory
from npu_agent.people.commands import view
from npu_agent.people.commands.common import probe_settings, vendor

_REFRESH = 2.0
"""Seconds after which a text is made again."""
_CALM = 5
"""As many times as long as a text took to make: a large cluster is not read all the time."""
_ENTER = "\033[?1049h\033[?25l"
"""Another screen, and no cursor: xterm's control sequences, which all terminals know."""
_LEAVE = "\033[?25h\033[?1049l"
"""Back from it."""
_HOME = "\033[H"
_REST_OF_LINE = "\033[K"
_REST = "\033[J"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Screen:
    """The alternate screen, from entering the context until it is left, however that happens.

    What was on the terminal before is there again afterwards. A key ends the task that entered it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._keyboard: list[Any] | None = None
        """The terminal's own settings, while keys are read one by one."""
        self.quit = False
        """Whether `q` was typed."""

    def __enter__(self) -> Self:
        sys.stdout.write(_ENTER)
        with suppress(OSError, ValueError, termios.error):  # stdin is not this terminal
            if os.tcgetpgrp(0) == os.getpgrp():
                self._keyboard = termios.tcgetattr(0)
                tty.setcbreak(0)
                asyncio.get_running_loop().add_reader(0, self._typed, asyncio.current_task())
        return self

    def _typed(self, task: asyncio.Task[Any] | None) -> None:
        keys = os.read(0, 64)
        if b"q" in keys.lower() and task:
            self.quit = True
            task.cancel()
        if not keys:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(0)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, termios.error):  # the terminal itself is gone
            if self._keyboard:
                asyncio.get_running_loop().remove_reader(0)
                termios.tcsetattr(0, termios.TCSADRAIN, self._keyboard)
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()

    def draw(self, text: str) -> None:
        """Shows these lines in place of those before; as many as there is room for."""
        height = shutil.get_terminal_size().lines
        lines = [f"{self._title}   {time.strftime('%Y-%m-%d %H:%M:%S')}   q or Ctrl-C ends", ""]
        lines += text.splitlines()
        if len(lines) > height:
            more = len(lines) - height + 1
            lines[height - 1 :] = [f"... {more} more lines, for which the terminal is too low"]
        shown = f"{_REST_OF_LINE}\n".join(lines)
        sys.stdout.write(f"{_HOME}{shown}{_REST_OF_LINE}{_REST}")
        sys.stdout.flush()


async def watch(args: argparse.Namespace, text: Callable[[], Awaitable[str]]) -> None:
    """Shows `text` until cancelled or quit: on a screen of its own, or printed when it differs.

    It is made every two seconds, and less often where that takes long.
    """
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    full = terminal and not view.is_data(args)
    with Screen(f"{program()} {args.command}") if full else nullcontext() as screen:
        printed = None
        try:
            while True:
                began = time.monotonic()
                shown = await text()
                pause = max(_REFRESH, _CALM * (time.monotonic() - began))
                if screen:
                    screen.draw(shown)
                elif shown != printed:
                    print(shown, flush=True)
                printed = shown
                await asyncio.sleep(pause)
        except asyncio.CancelledError:
            if not (screen and screen.quit):
                raise


async def watch_cards(
    args: argparse.Namespace,
    configured: Config,
    text: Callable[[Snapshot, Trends], Awaitable[str]],
) -> None:
    """`watch` of a text about the cards, probed and judged as the agent does by this config."""
    inventory = Inventory(vendor(args), Feed(probe_settings(args, configured)))
    # No TaskGroup: it would wrap the BrokenPipeError that `cli.main` handles.
    running = asyncio.create_task(inventory.run())

    async def of_the_cards() -> str:
        if running.done():
            running.result()  # raises what has ended it
        snapshot = await inventory.snapshots.until(lambda now: now.complete or now.skipped)
        return await text(snapshot, inventory.trends.value)

    try:
        await watch(args, of_the_cards)
    finally:
        running.cancel()


def run_until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs it until it ends, or a signal ends it; returns 0, or 128 + the signal's number."""
    code = 0

    async def act() -> None:
        # Not asyncio's own Ctrl-C, which cancels between any two instructions and so may break
        # into the work of an event (seen: InvalidStateError).
        this = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert this is not None  # noqa: S101  (for the type checker)

        def end(number: signal.Signals) -> None:
            nonlocal code
            code = 128 + number
            this.cancel()

        for number in _SIGNALS if current_thread() is main_thread() else ():
            loop.add_signal_handler(number, end, number)
        await work

    try:
        asyncio.run(act())
    except asyncio.CancelledError:
        if not code:
            raise
    return code
