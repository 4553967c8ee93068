"""pytest for CI: what failed is run once more, alone: ``python -m tests.again [options]``.

A change should not be refused for a test that a busy machine has upset, and such a test should not
stay as it is: one that passes the second time is named, and it, or the agent, has to be fixed.
Many failures are no accident: then nothing is run again.
"""

import subprocess
import sys

import pytest

MOST = 3
"""Tests that may get a second chance."""


class Failures:
    """Takes note of the tests that fail, with what they set up, as a plugin of pytest."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        if report.failed:
            self.tests[report.nodeid] = None


def main(options: list[str]) -> int:
    """Returns pytest's exit code, of the second run if there was one."""
    failures = Failures()
    code = pytest.main(options, plugins=[failures])
    failed = list(failures.tests)
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST:
        return code
    print("\nOnce more, alone:", *failed, sep="\n  ", flush=True)
    second = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], check=False
    )
    if second.returncode == 0:
        print("UNSTEADY, to be fixed (failed, then passed alone):", *failed, sep="\n  ")
    return second.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
