"""Container Device Interface: device nodes under a name that the container runtime knows.

With `allocation.method: cdi` the kubelet passes names on, such as ``example.com/npu=<device ID>``,
and the runtime finds the nodes in a spec file (cncf-tags/container-device-interface, SPEC.md). Not
the environment: a spec cannot join that of several devices. The specs of claims, and of a host
without a kubelet (`npu-agent cdi generate`), have both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_agent import files
from npu_agent.core.grant import NULL, Grant, grant
from npu_agent.core.ledger import PreparedClaim
from npu_agent.core.offer import Device
from npu_agent.logs import Reporter, logger

log = logger(__name__)

DIRECTORY = "var/run/cdi"
"""Below the host's root: for specs that change while runtimes run."""
RESYNC_INTERVAL = 30.0
"""Seconds between checks that the specs are still there: other programs clean up, and a runtime
reads them whenever it starts a container."""
_VERSION = "0.5.0"
"""The oldest version that knows all we use: `hostPath`, and names that begin with a digit."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
"""Of a CDI device: a runtime refuses a whole file for one name that does not match."""
EXTENDED = re.compile(r"(container-\d+)-request-\d+")
"""Requests of a claim that the scheduler made for a Pod with extended resources; group 1 is the
container (k8s.io/kubernetes, extendeddynamicresources.go)."""
_LARGEST = 4 << 20


class SpecDirectory:
    """Writes spec files to a directory, and rewrites those that others remove or change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, bytes] = {}
        """Contents by file name, as far as this agent has read or written them."""
        self._writing = Reporter(log, "the CDI specs cannot be written")

    @property
    def error(self) -> str | None:
        return self._writing.reason

    async def list(self, pattern: str) -> set[str]:
        """Returns the names of files that match a glob pattern; raises OSError."""
        return await files.matching(self.path, pattern)

    async def read(self, name: str) -> bytes:
        return await files.read(self.path / name, _LARGEST, follow=False)

    async def write(self, name: str, content: bytes | None) -> None:
        """Puts a file in place, or removes it (None); raises OSError."""
        path = self.path / name
        changed = await files.replace(path, content)
        if content is None:
            self.files.pop(name, None)
            return
        if changed and self.files.get(name) == content:
            log.warning("a CDI spec was missing or changed; written again", file=path)
        self.files[name] = content

    async def sync(self, wanted: Mapping[str, bytes]) -> None:
        """Writes `wanted` and removes the other `files`.

        The last good file stays where it cannot be replaced.
        """
        errors = []
        for name in {**self.files, **wanted}:
            try:
                await self.write(name, wanted.get(name))
            except OSError as error:
                errors.append(f"{self.path / name}: {error.strerror or error}")
                if name in self.files and not await self._is_intact(name):
                    del self.files[name]
        if errors:
            self._writing.failed("; ".join(errors))
        else:
            self._writing.works()

    async def _is_intact(self, name: str) -> bool:
        """Whether a file is still as it was written, or cannot be read."""
        try:
            return await self.read(name) == self.files[name]
        except (FileNotFoundError, NotADirectoryError, files.IrregularError):
            return False
        except OSError:
            return True


class PluginSpecs:
    """The device plugin's specs: on disk before a device is offered, and while it is held.

    They are of the offered devices, and of those that an agent before this one has left.

    A container cannot start without its device's spec, so what is held stays. The last good file
    stays where it cannot be replaced.
    """

    def __init__(self, directory: Path, kind: str, *, by_cdi: bool = False) -> None:
        """Reads nothing yet.

        Args:
            directory: where container runtimes read CDI specs.
            kind: of the CDI devices.
            by_cdi: whether containers get their devices by these specs. If not, what was left goes
                once no container holds any of it.
        """
        self.unwritten: frozenset[str] = frozenset()
        """IDs of devices whose spec on disk is missing or outdated."""
        self._directory = SpecDirectory(directory)
        self._kind = kind
        self._by_cdi = by_cdi
        self._ends = False
        self._decided: bytes | None = None
        """The spec of the last `write`."""
        self._published: bytes | None = None
        """The spec of the devices that are offered: all that can be held is in it."""
        self._read_as_owner: bool | None = None
        """Whether the node was ours when the files were read; None: not read."""

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def error(self) -> str | None:
        return self._directory.error if self._by_cdi else None

    def published(self) -> None:
        """The devices of the last `write` are offered now."""
        self._published = self._decided

    async def write(
        self, devices: Iterable[Device], held: Collection[str] | None, *, owned: bool, cards: bool
    ) -> None:
        """Writes the specs if the disk has others, or none: other programs clean up.

        Args:
            devices: what is to be offered.
            held: IDs of devices that containers hold; None: not known.
            owned: whether the node is this agent's, and not another one's with its own config.
            cards: whether the node has any.
        """
        if self._ends or (not owned and (cards or not self._by_cdi)):
            return
        if self._read_as_owner is not owned:
            self._published = await self._left_behind()
            self._directory.files = self._files(self._published)
            self._read_as_owner = owned
        if not (self._by_cdi or self._directory.files):
            return
        offered = devices if self._by_cdi else ()
        self._decided = plugin_spec(self._kind, offered, before=self._published, held=held)
        wanted = self._files(self._decided)
        await self._directory.sync(wanted)
        if self._directory.error and not self._by_cdi:
            # What is left does no harm, and the agent needs no right to write there.
            self._directory.files = {}
            return
        failed = self._directory.error
        self.unwritten = missing(wanted, self._directory.files) if failed else frozenset()

    async def end(self, *, remove: bool) -> None:
        """Stops writing; removes all specs if no container holds a device."""
        self._ends = True
        if remove:
            await self._directory.sync({})

    def _files(self, spec: bytes | None) -> dict[str, bytes]:
        return {} if spec is None else {spec_file(self._kind): spec}

    async def _left_behind(self) -> bytes | None:
        """Reads the spec of an earlier agent: its Pods may still run."""
        try:
            content = await self._directory.read(spec_file(self._kind))
        except OSError:
            return None
        spec = recovered(self._kind, content)
        ours = self._by_cdi or spec == content  # else it may be another program's
        return spec if ours else None


class ClaimSpecs:
    """The specs of one driver's claims: a file each, with a CDI device for each request."""

    def __init__(self, path: Path, kind: str) -> None:
        """`kind` is that of the CDI devices: ``example.com/claim``."""
        self.path = path
        self._directory = SpecDirectory(path)
        self._kind = kind

    async def write(self, claim: PreparedClaim, devices: Iterable[Device]) -> None:
        """Writes the spec of a claim that has these devices, in its order; raises OSError."""
        spec = claim_spec(self._kind, claim.uid, _claim_grants(claim, devices))
        await self._directory.write(claim_file(self._kind, claim.uid), spec)

    async def remove(self, uid: str) -> None:
        """Removes a claim's spec; one that stays is logged."""
        try:
            await self._directory.write(claim_file(self._kind, uid), None)
        except OSError as error:
            log.error("the CDI spec of a claim cannot be removed", uid=uid, error=error)

    async def remove_others(self, uids: Iterable[str]) -> None:
        """Removes the specs of all claims but these; raises OSError."""
        kept = {claim_file(self._kind, uid) for uid in uids}
        for name in await self._directory.list(claim_file(self._kind, "*")) - kept:
            await self._directory.write(name, None)

    def device_name(self, uid: str, request: str) -> str:
        """The name by which the runtime finds the devices of a request."""
        return f"{self._kind}={uid}-{request}"


def _claim_grants(claim: PreparedClaim, devices: Iterable[Device]) -> dict[str, Grant]:
    """The grant of each request: its own nodes, and the environment of all of its container."""
    by_request: dict[str, list[Device]] = {}
    by_container: dict[str, list[Device]] = {}
    for prepared, device in zip(claim.devices, devices, strict=True):
        by_request.setdefault(prepared.request, []).append(device)
        by_container.setdefault(_container(claim, prepared.request), []).append(device)
    environments = {name: grant(of).environment for name, of in by_container.items()}
    return {
        request: replace(grant(of), environment=environments[_container(claim, request)])
        for request, of in by_request.items()
    }


def _container(claim: PreparedClaim, request: str) -> str:
    match = EXTENDED.fullmatch(request)
    if match:
        return match[1]
    return "" if claim.joined else request


def plugin_spec(
    kind: str,
    devices: Iterable[Device],
    before: bytes | None = None,
    held: Collection[str] | None = (),
) -> bytes | None:
    """Returns the spec of these devices; None if there is none.

    Devices whose ID is not a CDI name, or that have no nodes, are left out: one of them would make
    the runtime refuse the whole file. Devices that containers hold (`held`, by ID) and that are not
    offered now stay as in `before`: when a container starts again in its Pod, the kubelet does
    not ask again, and passes on the CDI name of the first start. `held` None: unknown, so all stay.
    """
    entries: dict[str, Any] = {
        device.id: _node_entry(device.id, grant([device]).nodes)
        for device in sorted({d.id: d for d in devices}.values(), key=lambda d: d.order)
        if device.nodes and NAME.fullmatch(device.id)
    }
    if before and (held is None or not entries.keys() >= set(held)):
        for entry in json.loads(before)["devices"]:
            if held is None or entry["name"] in held:
                entries.setdefault(entry["name"], entry)
    return _spec(kind, [*entries.values()]) if entries else None


def spec_file(kind: str) -> str:
    return f"{kind.replace('/', '-')}.json"


def recovered(kind: str, content: bytes) -> bytes:
    """The spec as `plugin_spec` writes it, with those devices of a file that are so too.

    Anything else in it, such as hooks that would run as root, is not taken over.
    """
    try:
        devices = [entry for entry in json.loads(content)["devices"] if _is_ours(entry)]
    except (ValueError, KeyError, TypeError, RecursionError):
        devices = []
    return _spec(kind, list({entry["name"]: entry for entry in devices}.values()))


def _is_ours(entry: Any) -> bool:
    try:
        name = entry["name"]
        nodes = entry["containerEdits"]["deviceNodes"]
        paths = [(node["path"], node["hostPath"]) for node in nodes]
        ours = all(path.startswith("/dev/") and host in (path, NULL) for path, host in paths)
        return bool(paths and ours and NAME.fullmatch(name)) and entry == _node_entry(name, paths)
    except (KeyError, TypeError, AttributeError):
        return False


def missing(wanted: Mapping[str, bytes], written: Mapping[str, bytes]) -> frozenset[str]:
    """The names of the devices in `wanted` that are missing, or different, in `written`."""
    devices = {name: _by_name(content) for name, content in written.items()}
    return frozenset(
        device
        for name, content in wanted.items()
        for device, edits in _by_name(content).items()
        if devices.get(name, {}).get(device) != edits
    )


def _by_name(spec: bytes) -> dict[str, object]:
    return {entry["name"]: entry["containerEdits"] for entry in json.loads(spec)["devices"]}


def claim_file(kind: str, uid: str) -> str:
    return f"{kind.replace('/', '-')}-{uid}.json"


def claim_spec(kind: str, uid: str, grants: Mapping[str, Grant]) -> bytes:
    """The spec file of a claim: a CDI device for each request."""
    return grants_spec(
        kind, {f"{uid}-{request}": grant for request, grant in sorted(grants.items())}
    )


def grants_spec(kind: str, grants: Mapping[str, Grant]) -> bytes:
    """A spec file with a CDI device for each grant, by its name: environment and nodes."""
    entries: list[dict[str, object]] = [
        {
            "name": name,
            "containerEdits": {
                "env": [f"{variable}={value}" for variable, value in grant.environment],
                "deviceNodes": _nodes(grant.nodes),
            },
        }
        for name, grant in grants.items()
    ]
    return _spec(kind, entries)


def _spec(kind: str, entries: list[dict[str, object]]) -> bytes:
    # Without line breaks: those are the slow encoder's, and a Pod waits for it.
    spec = json.dumps({"cdiVersion": _VERSION, "kind": kind, "devices": entries})
    return spec.encode() + b"\n"


def _node_entry(name: str, nodes: Iterable[tuple[str, str]]) -> dict[str, object]:
    return {"name": name, "containerEdits": {"deviceNodes": _nodes(nodes)}}


def _nodes(nodes: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"path": path, "hostPath": host, "permissions": "rw"} for path, host in nodes]
