"""A program on a terminal of its own, as a person at a keyboard has it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.processes import DEADLINE

_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its controlling terminal, at which Ctrl-C is typed
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """The other end of a terminal; its methods block."""

    def __init__(self, popen: subprocess.Popen[bytes], end: int) -> None:
        self._popen = popen
        self._end = end
        # A read may end within a letter of several bytes.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.output = ""
        """All that was written to it."""

    def until(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Waits until the pattern is in the output behind its first `after` characters."""
        deadline = time.monotonic() + DEADLINE
        while (found := re.search(pattern, self.output[after:], re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"no {pattern}: ...{self.output[-800:]!r}"
            if not self._read(0.2):
                assert re.search(pattern, self.output[after:], re.DOTALL), self.output[-800:]
        return found

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def ended(self) -> int:
        """Waits for its end; the exit code."""
        deadline = time.monotonic() + DEADLINE
        while self._read(0.2):
            assert time.monotonic() < deadline, f"goes on: ...{self.output[-800:]!r}"
        return self._popen.wait(DEADLINE)

    def _read(self, seconds: float) -> bool:
        """Reads what there is; False at the end."""
        if not select.select([self._end], [], [], seconds)[0]:
            return self._popen.poll() is None
        try:
            found = os.read(self._end, 1 << 16)
        except OSError:  # EIO: nobody has the other end any more
            return False
        self.output += self._decoder.decode(found)
        return bool(found)


@contextmanager
def terminal(
    *command: object, columns: int = 80, lines: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Runs it on a terminal of this size; kills it in the end if it still runs."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    sizes = ("COLUMNS", "LINES")
    environ = {name: value for name, value in os.environ.items() if name not in sizes}
    popen = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _OWN_TERMINAL, *map(str, command)],
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
        env={**environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **(env or {})},
    )
    os.close(there)
    try:
        yield Terminal(popen, here)
    finally:
        popen.kill()
        popen.wait()
        os.close(here)


@contextmanager
def npu_agent(
    *arguments: object, columns: int = 80, lines: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """`npu-agent` on a terminal of this size."""
    command = (sys.executable, "-m", "npu_agent", *arguments)
    with terminal(*command, columns=columns, lines=lines, env=env) as running:
        yield running
