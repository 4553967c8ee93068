"""What this process may do: enough, and in the agent's Pod not more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from npu_agent.doctor.check import (
    SUDO,
    Check,
    Finding,
    Unseen,
    have,
    line,
    note,
    ok,
    unknown,
    unused,
    wrong,
)
from npu_agent.doctor.probe import Directory, probe
from npu_agent.doctor.situation import Situation
from npu_agent.files import content

_LARGEST = 1 << 16
_SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN, which only privileged containers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Privileges:
    """As in /proc/self/status; a process started in a container has the container's privileges."""

    capabilities: int
    """CapEff, a bit for each."""
    may_gain: bool
    """Whether a program can give it more: NoNewPrivs is 0."""
    seccomp: bool
    writable_root: bool


async def privileges(situation: Situation) -> Privileges | Unseen:
    """Probes them."""
    status, mounts = situation.proc / "self/status", situation.proc / "self/mounts"

    def read() -> Privileges | None:
        fields = _fields(content(status, _LARGEST) or b"")
        if "CapEff" not in fields:
            return None
        return Privileges(
            capabilities=int(fields["CapEff"], 16),
            may_gain=fields.get("NoNewPrivs") == "0",
            seccomp=fields.get("Seccomp", "0") != "0",
            writable_root=_writable_root(content(mounts, _LARGEST) or b""),
        )

    found = await probe(read)
    return found if found is not None else Unseen(f"{status} has no CapEff")


def _fields(status: bytes) -> Mapping[str, str]:
    lines = (text.partition(":") for text in status.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _writable_root(mounts: bytes) -> bool:
    """Whether the last file system mounted at / is writable; proc(5), /proc/pid/mounts."""
    lines = [text.split() for text in mounts.decode(errors="replace").splitlines()]
    options = [words[3].split(",") for words in lines if len(words) > 3 and words[1] == "/"]
    return bool(options) and "ro" not in options[-1]


def checks(
    situation: Situation, found: Privileges | Unseen, directory: Directory | Unseen
) -> Iterator[Check]:
    """What it means. `directory` is the kubelet's for device plugins."""
    yield line("uid", _of_uid, situation, directory)
    yield line("privileges", _of_excess, situation, found)


def _of_uid(situation: Situation, directory: Directory | Unseen) -> Finding:
    if situation.uid == 0:
        return ok("0, as the kubelet's directory needs it")
    if isinstance(directory, Directory) and (directory.writable or not directory.there):
        return ok(f"{situation.uid}, which may write to the plugin directory")
    if situation.in_pod:
        return wrong(
            f"{situation.uid}, which may not write to the plugin directory",
            "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it; no "
            "capability is needed",
        )
    return unknown(f"{situation.uid}: what only root may see is left out", SUDO)


def _of_excess(situation: Situation, privileges: Privileges | Unseen) -> Finding:
    if not situation.in_pod:
        return unused("only checked in the agent's Pod")
    found = have(privileges)
    more = []
    if found.capabilities:
        what = "is privileged" if found.capabilities & _SYS_ADMIN else "has capabilities"
        more.append((f"{what} (CapEff {found.capabilities:016x})", 'capabilities: {drop: ["ALL"]}'))
    if found.may_gain:
        more.append(("may gain privileges", "allowPrivilegeEscalation: false"))
    if not found.seccomp:
        more.append(("has no seccomp filter", "seccompProfile: {type: RuntimeDefault}"))
    if found.writable_root:
        more.append(("has a writable root file system", "readOnlyRootFilesystem: true"))
    if not more:
        return ok("none: no capability, none to be gained, seccomp on")
    return note(
        "more than it needs: it " + ", ".join(what for what, _ in more),
        "in the container's securityContext, privileged: false, "
        + ", ".join(remedy for _, remedy in more),
    )
