"""A seccomp filter on this process, as a container runtime sets one: some calls answer an errno."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RETURN_ERRNO = 0x0005_0000
_RETURN_ALLOW = 0x7FFF_0000
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Of classic BPF (linux/bpf_common.h); the number of the call is the first word of its input."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(calls: Sequence[int], *, error: int) -> None:
    """These calls, by number, fail with `error` from now on in this process and its children.

    Raises:
        OSError: the kernel takes no filter.
    """
    lines = [struct.pack("=HBBI", _LOAD_WORD, 0, 0, 0)]
    for at, call in enumerate(calls):
        to_the_error = len(calls) - at
        lines.append(struct.pack("=HBBI", _JUMP_EQUAL, to_the_error, 0, call))
    lines.append(struct.pack("=HBBI", _RETURN, 0, 0, _RETURN_ALLOW))
    lines.append(struct.pack("=HBBI", _RETURN, 0, 0, _RETURN_ERRNO | error))
    program = _Program(len(lines), b"".join(lines))
    libc = ctypes.CDLL(None, use_errno=True)
    for option in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*option):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def available() -> bool:
    """Whether this kernel has seccomp filters."""
    return "Seccomp:" in Path("/proc/self/status").read_text(encoding="utf-8")
