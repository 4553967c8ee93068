"""What this process may do: enough, and in the agent's Pod not more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.look import Directory, content, look
from npu_agent.doctor.situation import Situation

_LARGEST = 1 << 16
_SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN, which only privileged containers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Privileges:
    """As /proc/self/status tells them; containers are entered with the privileges they have."""

    capabilities: int
    """CapEff, a bit for each."""
    may_gain: bool
    """Whether a program can give it more: NoNewPrivs is 0."""
    seccomp: bool
    writable_root: bool


async def privileges(situation: Situation) -> Privileges | Unseen:
    """Looks at them."""
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

    found = await look(read)
    return found if found is not None else Unseen(f"{status} does not tell")


def _fields(status: bytes) -> Mapping[str, str]:
    lines = (line.partition(":") for line in status.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _writable_root(mounts: bytes) -> bool:
    """Whether the last file system mounted at / is writable; proc(5), /proc/pid/mounts."""
    lines = [line.split() for line in mounts.decode(errors="replace").splitlines()]
    options = [line[3].split(",") for line in lines if len(line) > 3 and line[1] == "/"]
    return bool(options) and "ro" not in options[-1]


def checks(
    situation: Situation, found: Privileges | Unseen, directory: Directory | Unseen
) -> Iterator[Check]:
    """What it means. `directory` is the kubelet's for device plugins."""
    yield _of_uid(situation, directory)
    if not situation.in_pod:
        yield Check("privileges", State.UNUSED, "only looked at in the agent's Pod")
    elif isinstance(found, Unseen):
        yield found.check("privileges")
    else:
        yield _of_excess(found)


def _of_uid(situation: Situation, directory: Directory | Unseen) -> Check:
    name = "uid"
    if situation.uid == 0:
        return Check(name, State.OK, "0, as the kubelet's directory wants it")
    if isinstance(directory, Directory) and (directory.writable or not directory.there):
        return Check(name, State.OK, f"{situation.uid}, and the plugin directory lets it write")
    if situation.in_pod:
        return Check(
            name,
            State.WRONG,
            f"{situation.uid}: the plugin directory is not for it",
            "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it; no "
            "capability is needed",
        )
    return Check(
        name,
        State.UNKNOWN,
        f"{situation.uid}: what only root may see is left out",
        "run this as root: sudo npu-agent doctor",
    )


def _of_excess(found: Privileges) -> Check:
    more = []
    if found.capabilities:
        said = "is privileged" if found.capabilities & _SYS_ADMIN else "has capabilities"
        more.append((f"{said} (CapEff {found.capabilities:016x})", 'capabilities: {drop: ["ALL"]}'))
    if found.may_gain:
        more.append(("may gain privileges", "allowPrivilegeEscalation: false"))
    if not found.seccomp:
        more.append(("has no seccomp filter", "seccompProfile: {type: RuntimeDefault}"))
    if found.writable_root:
        more.append(("has a writable root file system", "readOnlyRootFilesystem: true"))
    if not more:
        return Check("privileges", State.OK, "none: no capability, none to be gained, seccomp on")
    return Check(
        "privileges",
        State.NOTE,
        "more than it needs: it " + ", ".join(what for what, _ in more),
        "in the container's securityContext, privileged: false, "
        + ", ".join(remedy for _, remedy in more),
    )
