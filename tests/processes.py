"""`npu-agent` as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.until import wait_until

DEADLINE = 120.0
"""Seconds; guards against hanging and measures nothing."""

NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"),
    # The interpreter may be in root's home: reading is allowed everywhere, and nothing else.
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
"""What runs a command without root."""


class Process:
    """A running `npu-agent`; its methods block."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    @property
    def pid(self) -> int:
        return self.popen.pid

    def said(self, words: str) -> str:
        """Waits for a line of the log (stderr) with these words; returns it."""
        return _line(self.popen.stderr, words)

    def printed(self, words: str) -> str:
        """Waits for a line of stdout with these words; returns it."""
        return _line(self.popen.stdout, words)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal; returns the exit code, and what is left of stdout and stderr."""
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=DEADLINE)
        return self.popen.returncode, out, err


def _line(stream: IO[str] | None, words: str) -> str:
    assert stream
    lines = []
    for line in stream:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError(f"ended without {words!r}: {''.join(lines)}")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "", "COLUMNS": "200", **(extra or {})}


@contextmanager
def started(
    *arguments: str | Path,
    python: tuple[str, ...] = (),
    by: tuple[str, ...] = (),
    descriptors: tuple[int, ...] = (),
    **env: str,
) -> Iterator[Process]:
    """Starts `npu-agent` with these arguments; kills it in the end if it still runs.

    `by` is a command that becomes it, such as nohup; `descriptors` are inherited.
    """
    popen = subprocess.Popen(
        [*by, sys.executable, *python, "-m", "npu_agent", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(env),
        pass_fds=descriptors,
    )
    try:
        yield Process(popen)
    finally:
        popen.kill()
        popen.communicate()


def ran(*arguments: str | Path, **env: str) -> tuple[int, str, str]:
    """Runs `npu-agent` to its end: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "npu_agent", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment(env),
    )
    return done.returncode, done.stdout, done.stderr


def none_is_left(word: str) -> None:
    """Waits until no process has this word in its command."""

    def running() -> list[str]:
        commands = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                commands.append(process.read_text(encoding="utf-8"))
        return [command for command in commands if word in command]

    wait_until(lambda: not running(), f"the end of {word}")
