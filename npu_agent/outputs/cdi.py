"""Container Device Interface: device nodes under a name that the container runtime knows.

With `allocation.method: cdi` the kubelet passes names on, such as ``example.com/npu=<device ID>``,
and the runtime finds the nodes in a spec file (cncf-tags/container-device-interface, SPEC.md). Not
the environment: a spec cannot join that of several devices. The specs of claims and of `host_specs`
have both.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_agent import files
from npu_agent.core.grant import NULL, Grant, grant
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.offer import Device, cut, names
from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread

log = logger(__name__)

DIRECTORY = "var/run/cdi"
"""Below the host's root: for specs that change while runtimes run."""
HOST_DIRECTORY = "etc/cdi"
"""Below the host's root: for the specs of the host."""
LOOK_EVERY = 30.0
"""Seconds between checks that the specs are still there: other programs clean up, and a runtime
reads them whenever it starts a container."""
ALL = "all"
"""The name of all cards together in a host's spec."""
_VERSION = "0.5.0"
"""The oldest version that knows all we use: `hostPath`, and names that begin with a digit."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_LISTING = 5.0
_LARGEST = 4 << 20


class SpecDirectory:
    """Writes spec files to a directory, and rewrites those that others remove or change."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """`durable` specs survive a power cut; those below /var/run need not."""
        self.path = path
        self.files: dict[str, bytes] = {}
        """Contents by file name, as far as this agent has read or written them."""
        self._durable = durable
        self._writing = Reporter(log, "the CDI specs cannot be written")

    @property
    def error(self) -> str | None:
        return self._writing.reason

    async def list(self, pattern: str) -> set[str]:
        """Returns the names of files that match a glob pattern; raises OSError."""
        found = await DaemonThread("npu-cdi").call(
            lambda: [*self.path.glob(pattern)], deadline=_LISTING
        )
        return {path.name for path in found}

    async def read(self, name: str) -> bytes:
        return await files.read(self.path / name, _LARGEST, follow=False)

    async def write(self, name: str, content: bytes | None) -> bool:
        """Puts a file in place, or removes it (None); returns whether that changed it."""
        path = self.path / name
        changed = await files.replace(path, content, durable=self._durable)
        if content is None:
            self.files.pop(name, None)
            return changed
        if changed and self.files.get(name) == content:
            log.warning("a CDI spec was missing or changed; written again", file=path)
        self.files[name] = content
        return changed

    async def sync(self, wanted: Mapping[str, bytes | None]) -> bool:
        """Writes `wanted` and removes the other `files`; returns whether any was another one.

        The last good file stays where it cannot be replaced.
        """
        changed, errors = False, []
        for name in {**self.files, **wanted}:
            try:
                changed |= await self.write(name, wanted.get(name))
            except OSError as error:
                errors.append(f"{self.path / name}: {error.strerror or error}")
                if name in self.files and not await self._is_intact(name):
                    del self.files[name]
        if errors:
            self._writing.failed("; ".join(errors))
        else:
            self._writing.works()
        return changed

    async def _is_intact(self, name: str) -> bool:
        """Whether a file is still as it was written, or cannot be read."""
        try:
            return await self.read(name) == self.files[name]
        except (FileNotFoundError, NotADirectoryError, files.IrregularError):
            return False
        except OSError:
            return True


def specs(
    devices: Iterable[Device],
    before: Mapping[str, bytes] | None = None,
    held: Collection[str] | None = (),
) -> dict[str, bytes]:
    """The spec files for these devices by their names in `DIRECTORY`: one for each vendor's kind.

    Devices whose ID is not a CDI name, or that have no nodes, are left out: one of them would make
    the runtime refuse the whole file. Devices that containers hold (`held`, by ID) and that are not
    offered now stay as in `before`: when a container starts again in its Pod, the kubelet does
    not ask again, and passes on the CDI name of the first start. `held` None: unknown, so all stay.
    """
    found: dict[str, list[dict[str, object]]] = {}
    written = set()
    for device in sorted({d.id: d for d in devices}.values(), key=lambda d: d.order):
        if device.nodes and _NAME.fullmatch(device.id):
            found.setdefault(device.card.access.cdi_kind, []).append(_entry(device))
            written.add(device.id)
    if held is None or not written.issuperset(held):
        for spec in map(json.loads, (before or {}).values()):
            kept = [
                each
                for each in spec["devices"]
                if each["name"] not in written and (held is None or each["name"] in held)
            ]
            if kept:
                found.setdefault(spec["kind"], []).extend(kept)
    return {spec_file(kind): _spec(kind, entries) for kind, entries in found.items()}


def spec_file(kind: str) -> str:
    return f"{kind.replace('/', '-')}.json"


def recovered(kind: str, content: bytes) -> bytes:
    """The spec of this kind, as `specs` writes it, with those devices of a file that are so too.

    Anything else in it, such as hooks that would run as root, is not taken over.
    """
    try:
        devices = [each for each in json.loads(content)["devices"] if _is_ours(each)]
    except (ValueError, KeyError, TypeError, RecursionError):
        devices = []
    return _spec(kind, list({each["name"]: each for each in devices}.values()))


def _is_ours(entry: Any) -> bool:
    try:
        name, nodes = entry["name"], entry["containerEdits"]["deviceNodes"]
        paths = [(one["path"], one["hostPath"]) for one in nodes]
        ours = all(path.startswith("/dev/") and host in (path, NULL) for path, host in paths)
        return bool(paths and ours and _NAME.fullmatch(name)) and entry == _node_entry(name, paths)
    except (KeyError, TypeError, AttributeError):
        return False


def missing(wanted: Mapping[str, bytes], there: Mapping[str, bytes]) -> frozenset[str]:
    """The names of the devices in `wanted` that are missing, or different, in `there`."""
    found = {name: _by_name(content) for name, content in there.items()}
    return frozenset(
        device
        for name, content in wanted.items()
        for device, edits in _by_name(content).items()
        if found.get(name, {}).get(device) != edits
    )


def _by_name(spec: bytes) -> dict[str, object]:
    return {each["name"]: each["containerEdits"] for each in json.loads(spec)["devices"]}


@dataclass(frozen=True, slots=True)
class HostSpecs:
    """The CDI specs of a host without a kubelet."""

    files: Mapping[str, bytes | None]
    """By their names in `HOST_DIRECTORY`, one for each kind; None: there is to be no such file."""
    names: tuple[str, ...]
    """As a runtime is asked for them: ``example.com/npu=npu0``."""
    left_out: tuple[str, ...]
    """What is not offered, with the reason: ``npu1: unhealthy: ...``."""


def host_specs(
    snapshot: Snapshot,
    widths: Mapping[str, Collection[int]],
    known: Iterable[str],
    disabled: Collection[str] = (),
) -> HostSpecs:
    """The specs for people who name cards by hand, as in ``docker run --device``.

    A card is named by its ID (mostly its UUID) and ``npu0``, its parts ``npu0:0-3``, and all
    healthy cards of a vendor together ``all``; each has nodes and environment. Allocations
    are not tracked: two containers can be given the same card. Unhealthy cards and those of
    `disabled` are left out: a runtime then says that it does not know the device, and the container
    is not started.
    """
    unwanted = {word.lower() for word in disabled}
    kinds: dict[str, dict[str, Grant]] = {}
    whole: dict[str, list[Device]] = {}
    left_out: list[str] = []
    numbers = Counter(state.card.name for state in snapshot.cards)
    for state in snapshot.cards:
        card = state.card
        if unwanted & names(state):
            left_out.append(f"{card.name}: disabled by the config")
            continue
        (device,) = cut(state, card.core_count)
        if not device.healthy:
            left_out.append(f"{card.name}: unhealthy: {device.reason}")
            continue
        if shared := numbers[card.name] > 1:
            left_out.append(f"the name {card.name}: several cards have it; use {state.id}")
        granted = kinds.setdefault(card.access.cdi_kind, {})
        whole.setdefault(card.access.cdi_kind, []).append(device)
        for name, one in _host_devices(state, device, widths[card.family], by_number=not shared):
            if one.nodes and _NAME.fullmatch(name):
                granted[name] = grant([one])
    for kind, devices in whole.items():
        kinds[kind][ALL] = grant(devices)
    files = {
        spec_file(kind): _spec(kind, _entries(kinds[kind])) if kind in kinds else None
        for kind in sorted({*known, *kinds})
    }
    offered = (f"{kind}={name}" for kind, granted in kinds.items() for name in granted)
    return HostSpecs(files, tuple(offered), tuple(left_out))


def _host_devices(
    state: CardState, whole: Device, widths: Collection[int], *, by_number: bool
) -> Iterator[tuple[str, Device]]:
    yield state.id, whole
    if not by_number:
        return
    yield whole.name, whole
    for width in sorted(set(widths), reverse=True):
        for part in cut(state, width):
            if part.healthy:
                yield f"{state.card.name}:{part.cores}", part


def claim_file(kind: str, uid: str) -> str:
    return f"{kind.replace('/', '-')}-{uid}.json"


def claim_name(kind: str, uid: str, request: str) -> str:
    return f"{kind}={uid}-{request}"


def claim_spec(kind: str, uid: str, grants: Mapping[str, Grant]) -> bytes:
    """The spec file of a claim: a CDI device for each request."""
    return _spec(
        kind, _entries({f"{uid}-{request}": one for request, one in sorted(grants.items())})
    )


def _entries(grants: Mapping[str, Grant]) -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "containerEdits": {
                "env": [f"{variable}={value}" for variable, value in one.environment],
                "deviceNodes": _nodes(one.nodes),
            },
        }
        for name, one in grants.items()
    ]


def _spec(kind: str, entries: list[dict[str, object]]) -> bytes:
    # Without line breaks: those are the slow encoder's, and a Pod waits for it.
    spec = json.dumps({"cdiVersion": _VERSION, "kind": kind, "devices": entries})
    return spec.encode() + b"\n"


def _entry(device: Device) -> dict[str, object]:
    return _node_entry(device.id, grant([device]).nodes)


def _node_entry(name: str, nodes: Iterable[tuple[str, str]]) -> dict[str, object]:
    return {"name": name, "containerEdits": {"deviceNodes": _nodes(nodes)}}


def _nodes(nodes: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"path": path, "hostPath": host, "permissions": "rw"} for path, host in nodes]
