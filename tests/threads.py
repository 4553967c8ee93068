"""Which daemon threads there are."""

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator

from npu_agent.threads import DaemonThread

_strangers: set[DaemonThread] = set()
"""Those that hang since the tests of another module."""


def working() -> Iterator[DaemonThread]:
    """Those that make a call, or wait for the next one; each as often as it has threads."""
    for innermost in sys._current_frames().values():
        *_, (frame, _) = traceback.walk_stack(innermost)
        if frame.f_code is DaemonThread._work.__code__:
            yield frame.f_locals["self"]


def ours() -> list[DaemonThread]:
    """Those of this test."""
    return [thread for thread in working() if thread not in _strangers]


@contextlib.contextmanager
def no_thread_stays() -> Iterator[None]:
    """Asserts that those of a test end with it."""
    _strangers.update(working())
    yield
    until = time.monotonic() + 30
    while ours() and time.monotonic() < until:
        time.sleep(0.01)
    assert not ours()
    _strangers.clear()
