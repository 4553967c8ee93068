"""What all tests share."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from npu_agent import logs
from tests import golden
from tests.leftovers import pytest_runtest_protocol

__all__ = ["pytest_runtest_protocol"]

# In CI the same examples each time: a change should not fail for what it did not touch. People
# get new ones at every run, and so find what is left to find.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("people", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "people")

# nohup, or `&` in a script, has these ignored, and what the tests start would inherit that: then it
# could not be stopped as a terminal does it. A handler is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

ROOM = Path(__file__).parent
TIMEOUTS = {"bench": 300, "conformance": 1800, "e2e": 300, "packaging": 900, "k8s": 1800}
"""Seconds that a test may take with what it starts and, the first time, builds: in these folders.
The rest has pyproject.toml's. Generous: they guard against hanging."""


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> None:
    """A command that an earlier test ran has set its own level, and logs to what is closed now."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.handlers[:] = [each for each in root.handlers if not isinstance(each, logs._Stderr)]


def pytest_configure(config: pytest.Config) -> None:
    """Makes the runbook of docs/ as it is now, once for all workers."""
    if not hasattr(config, "workerinput") and _is_stale():
        subprocess.run([sys.executable, "docs/runbook.py"], cwd=ROOM.parent, check=True)


def _is_stale() -> bool:
    docs, web = ROOM.parent / "docs", ROOM.parent / "npu_agent/outputs/web"
    pages = [page for name in ("alerts", "troubleshooting") for page in docs.glob(f"**/{name}.md")]
    changed = max(page.stat().st_mtime for page in (docs / "runbook.py", *pages))
    runbooks = [*web.glob("runbook.??.html")]
    return len(runbooks) < 3 or changed > min(runbook.stat().st_mtime for runbook in runbooks)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests that build and start things their own timeout."""
    for item in items:
        timeout = TIMEOUTS.get(item.path.relative_to(ROOM).parts[0])
        if timeout:
            item.add_marker(pytest.mark.timeout(timeout))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes a failure quick to read: see tests/golden.py. With -vv it is as long as it is."""
    report = yield
    if report.failed and golden.USED:
        report.sections.append(("golden files", golden.remedy(item.nodeid)))
    if report.failed and item.config.get_verbosity() < 1:
        if report.longreprtext != (short := golden.shortened(report.longreprtext)):
            report.longrepr = short
        report.sections = [(name, golden.shortened(text)) for name, text in report.sections]
    if call.when == "teardown":
        golden.USED.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Adds the seconds of each test, with what it sets up, to the file that .ci/run names."""
    file = os.environ.get("NPU_AGENT_DURATIONS")
    if not file or "PYTEST_XDIST_WORKER" in os.environ:  # the one that started it has all reports
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = "".join(f"{took:.1f}\t{version}\t{test}\n" for test, took in seconds.items())
    with Path(file).open("ab", buffering=0) as out:  # in one piece: others write to it as well
        out.write(lines.encode())
