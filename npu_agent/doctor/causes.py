"""Which lines follow from which: what cannot be well while something before it is wrong.

Only what would be repeated anyway is named here. A line that is folded as a consequence is there
again once its cause is fixed, if it was wrong for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from npu_agent.doctor.check import Check, Verdict

_SYS = ("host root", "/sys")
_KUBELET = ("plugin directory", "kubelet.sock")
_API = ("API server",)
_NODE = ("API server", "NODE_NAME", "rights", "Node")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "/sys": ("host root",),
    "/dev": ("host root",),
    "driver": _SYS,
    "PCI": _SYS,
    "cards": _SYS,
    "card": (*_SYS, "/dev"),
    "odd": _SYS,
    "plugin directory": ("uid",),
    "kubelet.sock": ("uid", "plugin directory"),
    "our sockets": ("plugin directory",),
    "other plugins": ("plugin directory",),
    "serving agent": _KUBELET,
    "pod-resources": _KUBELET,
    "cgroups": _SYS,
    "resource": (*_SYS, *_KUBELET, "other plugins", "odd", "readiness"),
    "CDI directory": ("host root",),
    "NFD directory": ("host root",),
    "metrics.listen": ("metrics.tls",),
    "readiness": (*_KUBELET, *_API, "rights"),
    "rights": _API,
    "Node": ("API server", "NODE_NAME", "rights"),
    "allocatable": (
        *_SYS,
        "/dev",
        *_NODE,
        *_KUBELET,
        "other plugins",
        "odd",
        "resource",
        "readiness",
    ),
    "labels": (*_SYS, *_NODE, "odd", "rights", "NFD directory"),
    "DRA": _NODE,
    "DRA registry of": (*_KUBELET, "DRA"),
    "DRA directory of": (*_KUBELET, "DRA"),
    "DRA slices of": (*_API, "NODE_NAME", "DRA", "rights", "DRA registry of", "readiness"),
    "DRA features for": (*_API, "NODE_NAME", "rights"),
    "DRA counters for": (*_API, "NODE_NAME", "rights"),
    "DeviceClass": _API,
    "policy": (*_API, "rights"),
}
"""For a line, by its name or how that begins, those that it may follow from; see `with_causes`."""


def with_causes(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The same lines, those that follow from another one with its name.

    What is wrong explains whatever is not well behind it; what could not be seen explains only
    what could not be seen either.
    """
    every = tuple(checks)
    return tuple(replace(check, follows=_cause(check, every)) for check in every)


def _cause(check: Check, every: tuple[Check, ...]) -> str:
    if check.state in (Verdict.OK, Verdict.UNUSED):
        return ""
    for name in CAUSES.get(_key(check.name), ()):
        for other in every:
            if other.name != name and _key(other.name) != name:
                continue
            both = {check.state, other.state} == {Verdict.UNKNOWN}
            if other.state is Verdict.WRONG or both:
                return other.name
    return ""


def _key(name: str) -> str:
    """The longest beginning of a line's name that is a key, in whole words."""
    words = name.split(" ")
    begins = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    return next((each for each in begins if each in CAUSES), name)
