"""io_uring's calls under real filters of this kernel, and each reason for a refusal."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_agent.people import iouring
from npu_agent.people.doctor.check import State
from tests.seccomp import available

FILTERED = """
import json, sys
from pathlib import Path
from npu_agent.people import iouring
from tests.seccomp import install

install([int(number) for number in sys.argv[2].split(",")], error=int(sys.argv[3]))
print(json.dumps([iouring.refused(), iouring.verdict(Path(sys.argv[1])).as_json()]))
"""

SETUP, ENTER, REGISTER = 425, 426, 427


def root_with(tmp_path: Path, sysctl: str | None) -> Path:
    if sysctl is not None:
        (tmp_path / "proc/sys/kernel").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/io_uring_disabled").write_text(sysctl, encoding="utf-8")
    return tmp_path


@pytest.mark.skipif(not available(), reason="this kernel, or the container, takes no filter")
@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ((SETUP, ENTER, REGISTER), errno.EPERM),
        ((SETUP, ENTER, REGISTER), errno.ENOSYS),
        ((REGISTER,), errno.EPERM),
    ],
)
def test_a_real_filter(calls: tuple[int, ...], error: int, tmp_path: Path) -> None:
    numbers = ",".join(map(str, calls))
    command = [sys.executable, "-c", FILTERED, str(tmp_path), numbers, str(error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    refused, line = json.loads(done.stdout)
    filtered = {SETUP: "io_uring_setup", ENTER: "io_uring_enter", REGISTER: "io_uring_register"}
    assert {name: refused.get(name) for name in (filtered[call] for call in calls)} == {
        filtered[call]: error for call in calls
    }
    assert line["state"] == "wrong"
    assert "filtered by the Pod's seccomp profile: " in line["detail"]
    assert errno.errorcode[error] in line["detail"]
    assert "seccompProfile: {type: Unconfined}" in line["remedy"]


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_calls_that_are_allowed_leave_nothing_open() -> None:
    before = descriptors()
    refused = iouring.refused()
    assert descriptors() == before
    if not refused:  # where the tests run without a filter, as on most machines
        assert iouring.verdict(Path("/")).state is State.OK


@pytest.mark.parametrize(
    ("refused", "sysctl", "filtered", "detail", "remedy"),
    [
        (
            {"io_uring_setup": errno.EPERM},
            "2\n",
            False,
            "switched off on this node by kernel.io_uring_disabled = 2",
            "the node's administrator sets kernel.io_uring_disabled = 0",
        ),
        ({"io_uring_setup": errno.EPERM}, "1\n", True, "= 1", "administrator"),
        (
            dict.fromkeys(("io_uring_setup", "io_uring_enter"), errno.EPERM),
            "2\n",
            True,
            "seccomp profile: io_uring_setup EPERM, io_uring_enter EPERM",
            "/etc/sysctl.d/90-npu.conf",
        ),
        ({"io_uring_setup": errno.ENOSYS}, None, False, "kernel", "CONFIG_IO_URING=y"),
        ({"io_uring_setup": errno.EACCES}, "0\n", False, "security module", "ausearch"),
        ({"io_uring_setup": errno.EPERM}, "nonsense", True, "seccomp", "Unconfined"),
    ],
)
def test_why_not_and_who_can_change_it(
    refused: dict[str, int],
    sysctl: str | None,
    filtered: bool,
    detail: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iouring, "refused", lambda: refused)
    monkeypatch.setattr(iouring, "_is_filtered", lambda: filtered)
    line = iouring.verdict(root_with(tmp_path, sysctl))
    assert line.state is State.WRONG
    assert detail in line.detail
    assert remedy in line.remedy


def test_a_sysctl_that_stops_others_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 a process with CAP_SYS_ADMIN may: the call tells."""
    monkeypatch.setattr(iouring, "refused", dict)
    assert iouring.verdict(root_with(tmp_path, "1\n")).state is State.OK
