"""Dependencies between lines: a line that cannot be good while another is wrong.

Only what would be repeated anyway is named here. A line that is folded as a consequence is there
again once its cause is fixed, if it was wrong for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from npu_agent.people.doctor.check import Check, State

_SYS = ("host root", "/sys")
_KUBELET = ("plugin directory", "kubelet.sock")
_NODE = ("API server", "NODE_NAME", "rights", "Node")
_ASKED = ("API server", "NODE_NAME", "rights")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "/sys": ("host root",),
    "/dev": ("host root",),
    "driver *": _SYS,
    "PCI": _SYS,
    "cards": _SYS,
    "card *": (*_SYS, "/dev"),
    "odd *": _SYS,
    "plugin directory": ("uid",),
    "kubelet.sock": ("uid", "plugin directory"),
    "other plugins": ("plugin directory",),
    "serving agent": _KUBELET,
    "pod-resources": _KUBELET,
    "cgroups": _SYS,
    "resource *": (*_SYS, *_KUBELET, "other plugins", "UUIDs", "odd *", "readiness"),
    "CDI directory": ("host root",),
    "NFD directory": ("host root",),
    "metrics.listen": ("metrics.tls", "readiness"),
    "readiness": (*_KUBELET, "API server", "rights"),
    "rights": ("API server",),
    "Node": _ASKED,
    "allocatable *": (
        *(*_SYS, "/dev", *_NODE, *_KUBELET),
        *("other plugins", "odd *", "resource *", "readiness"),
    ),
    "labels": (*_NODE, "NFD directory", "readiness"),
    "DRA": _NODE,
    "DRA registry of *": (*_KUBELET, "DRA"),
    "DRA directory of *": (*_KUBELET, "DRA"),
    "DRA slices of *": (*_ASKED, "DRA", "DRA registry of *", "readiness"),
    "DeviceClass *": ("API server",),
    "policy *": ("API server", "rights"),
}
"""For a line those that it may follow from; a name with ``*`` stands for several."""


def with_causes(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Returns the lines, each with the name of the line that it follows from.

    What is wrong explains all that follows; what could not be seen explains only what could not be
    seen either.
    """
    every = tuple(checks)
    return tuple(replace(check, follows=_cause(check, every)) for check in every)


def _cause(check: Check, every: tuple[Check, ...]) -> str:
    if check.state in (State.OK, State.UNUSED):
        return ""
    causes = (causes for name, causes in CAUSES.items() if fnmatchcase(check.name, name))
    for cause in next(causes, ()):
        for other in every:
            explains = other.state is State.WRONG or check.state is other.state is State.UNKNOWN
            if explains and fnmatchcase(other.name, cause):
                return other.name
    return ""
