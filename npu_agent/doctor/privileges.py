"""What this process may do: enough, and in the agent's Pod not more."""

from __future__ import annotations

from npu_agent.doctor.check import SUDO, Finding, Lines, Unseen, note, ok, unknown, unused, wrong
from npu_agent.doctor.probe import probe
from npu_agent.doctor.situation import Situation
from npu_agent.doctor.sockets import plugin_directory
from npu_agent.files import content

_LARGEST = 1 << 16
_SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN, which only privileged containers have."""


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "uid", _uid(here)
    yield "privileges", _privileges(here)


async def _uid(here: Situation) -> Finding:
    if here.uid == 0:
        return ok("0, as the kubelet's directory needs it")
    directory = await here.see_or(plugin_directory, None)
    if directory is not None and (directory.writable or not directory.there):
        return ok(f"{here.uid}, which may write to the plugin directory")
    if here.in_pod:
        return wrong(
            f"{here.uid}, which may not write to the plugin directory",
            "runAsUser: 0 in the Pod's securityContext, as k8s/daemonset.yaml has it; no "
            "capability is needed",
            here.apply_again(),
        )
    return unknown(f"{here.uid}: what only root may see is left out", SUDO)


async def _privileges(here: Situation) -> Finding:
    """By proc(5): a process started in a container has the container's privileges."""
    if not here.in_pod:
        return unused("only checked in the agent's Pod")
    status, mounts = (here.proc / "self" / name for name in ("status", "mounts"))
    text = await probe(lambda: content(status, _LARGEST) or b"")
    fields = {
        name: value.strip()
        for name, _, value in (
            row.partition(":") for row in text.decode(errors="replace").splitlines()
        )
    }
    if "CapEff" not in fields:
        raise Unseen(f"{status} has no CapEff")
    more = []
    if capabilities := int(fields["CapEff"], 16):
        what = "is privileged" if capabilities & _SYS_ADMIN else "has capabilities"
        more.append((f"{what} (CapEff {capabilities:016x})", 'capabilities: {drop: ["ALL"]}'))
    if fields.get("NoNewPrivs") == "0":
        more.append(("may gain privileges", "allowPrivilegeEscalation: false"))
    if fields.get("Seccomp", "0") == "0":
        more.append(("has no seccomp filter", "seccompProfile: {type: RuntimeDefault}"))
    if _writable_root(await probe(lambda: content(mounts, _LARGEST) or b"")):
        more.append(("has a writable root file system", "readOnlyRootFilesystem: true"))
    if not more:
        return ok("none: no capability, none to be gained, seccomp on")
    return note(
        "more than it needs: it " + ", ".join(what for what, _ in more),
        "in the container's securityContext, privileged: false, "
        + ", ".join(remedy for _, remedy in more),
    )


def _writable_root(mounts: bytes) -> bool:
    """Whether the last file system mounted at / is writable; proc(5), /proc/pid/mounts."""
    rows = [row.split() for row in mounts.decode(errors="replace").splitlines()]
    options = [words[3].split(",") for words in rows if len(words) > 3 and words[1] == "/"]
    return bool(options) and "ro" not in options[-1]
