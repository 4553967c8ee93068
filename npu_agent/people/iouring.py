"""io_uring, which jobs on some cards need, and which runtimes and distributions take away.

The default seccomp profile of container runtimes filters its calls, `kernel.io_uring_disabled`
switches it off for a node, and a security module may refuse it. Only a call in the job's own
container tells, so `verify` makes each; `doctor`, which runs elsewhere, reads the sysctl.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

from npu_agent.files import content
from npu_agent.people.doctor.check import Check, State

_CALLS: dict[str, tuple[int, ...]] = {
    "io_uring_setup": (425, 0, 0),
    "io_uring_enter": (426, -1, 0, 0, 0, 0, 0),
    "io_uring_register": (427, -1, 0, 0, 0),
}
"""By name, number and arguments. Each has a bad pointer or descriptor, so that the kernel answers
with EFAULT, EBADF or EINVAL and does nothing. The numbers are those of every architecture."""
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)

SYSCTL = "kernel.io_uring_disabled"
SWITCHED_ON = f"{SYSCTL} = 0 in /etc/sysctl.d/90-npu.conf, then `sysctl --system`"
"""The remedy of a node's administrator."""
_UNFILTERED = (
    "who writes the Pod sets `securityContext: {seccompProfile: {type: Unconfined}}`, or type "
    "Localhost with a profile that allows these calls (docs/pods.md)"
)


def refused() -> dict[str, int]:
    """Returns the calls that this process may not make, each with its errno; changes nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    errors: dict[str, int] = {}
    for name, arguments in _CALLS.items():
        libc.syscall(*(ctypes.c_long(argument) for argument in arguments))
        error = ctypes.get_errno()
        if error in _REFUSALS:
            errors[name] = error
    return errors


def switched_off(root: Path) -> int:
    """The sysctl of the kernel below `root`: 0 for all, 1 for few, 2 for every process.

    0 where there is no such file: kernels before 6.6 cannot switch it off.
    """
    raw = content(root / "proc/sys" / SYSCTL.replace(".", "/"), 16) or b""
    return int(raw) if raw.strip() in (b"1", b"2") else 0


def verdict(root: Path) -> Check:
    """Whether a job in this container may use io_uring, else why not and who can change it."""
    errors = refused()
    if not errors:
        return _check(State.OK, "allowed")
    calls = ", ".join(f"{name} {errno.errorcode[error]}" for name, error in errors.items())
    off = switched_off(root)
    if off and list(errors) == ["io_uring_setup"]:
        detail = f"switched off on this node by {SYSCTL} = {off}"
        return _check(State.WRONG, detail, f"the node's administrator sets {SWITCHED_ON}")
    if _is_filtered():
        remedy = _UNFILTERED
        if off:
            remedy += f"; and the node's administrator sets {SWITCHED_ON}"
        return _check(State.WRONG, f"filtered by the Pod's seccomp profile: {calls}", remedy)
    if errno.ENOSYS in errors.values():
        remedy = "the node's administrator boots a kernel with CONFIG_IO_URING=y"
        return _check(State.WRONG, f"not in this node's kernel: {calls}", remedy)
    remedy = (
        "the node's administrator allows io_uring for this container's domain: "
        "`ausearch -m avc -ts recent` shows the refusal"
    )
    return _check(State.WRONG, f"refused by a security module of this node: {calls}", remedy)


def _is_filtered() -> bool:
    """Whether a seccomp filter is on this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return "\nSeccomp:\t2\n" in status


def _check(state: State, detail: str, remedy: str = "") -> Check:
    return Check("io_uring", state, detail, remedy)
