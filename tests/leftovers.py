"""One failure is one failure: what a failed test leaves behind is not charged to a later test.

Such a test's processes and sockets are in the frames of its traceback. Where a later test drops
them, Python warns, and a warning is an error here.
"""

import gc
import sys
import warnings
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Drops them right after the test that failed."""
    failures = item.session.testsfailed
    result = yield
    if item.session.testsfailed > failures:
        for name in ("last_exc", "last_value", "last_traceback"):  # where pytest keeps them
            vars(sys).pop(name, None)
        report = sys.unraisablehook
        sys.unraisablehook = lambda _: None  # a process of asyncio, on a loop that is closed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
        sys.unraisablehook = report
    return result
