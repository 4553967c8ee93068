"""A terminal's alternate screen, for commands that go on; and how these are ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self

_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
"""Another screen, and no cursor; and back: xterm's control sequences, which all terminals know."""
_HOME, _REST_OF_LINE, _REST = "\033[H", "\033[K", "\033[J"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_screen() -> bool:
    """Whether stdout is a terminal that has an alternate screen."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The alternate screen, from entering the context until it is left, however that happens.

    What was on the terminal before is there again afterwards.
    """

    def __init__(self, title: str) -> None:
        """`title` stands in the first line, before the time."""
        self._title = title

    def __enter__(self) -> Self:
        sys.stdout.write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal itself is gone
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()

    def draw(self, text: str) -> None:
        """Shows these lines in place of those before; as many as there is room for."""
        height = shutil.get_terminal_size().lines
        lines = [f"{self._title}   {time.strftime('%Y-%m-%d %H:%M:%S')}   Ctrl-C ends", ""]
        lines += text.splitlines()
        if len(lines) > height:
            more = len(lines) - height + 1
            lines[height - 1 :] = [f"... {more} more lines, for which the terminal is too low"]
        shown = f"{_REST_OF_LINE}\n".join(lines)
        sys.stdout.write(f"{_HOME}{shown}{_REST_OF_LINE}{_REST}")
        sys.stdout.flush()


def run_until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs it until it ends, or a signal ends it: then it is cancelled, and may clean up.

    Returns:
        The exit code: 0, or as a shell has it, 128 + the signal's number.
    """
    code = 0

    async def act() -> None:
        # Not asyncio's own Ctrl-C, which cancels between any two instructions and so may break
        # into the work of an event (seen: InvalidStateError).
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None  # noqa: S101  (for the type checker)

        def end(number: signal.Signals) -> None:
            nonlocal code
            code = 128 + number
            this.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, end, number)
        await work

    try:
        asyncio.run(act())
    except asyncio.CancelledError:
        if not code:
            raise
    return code
