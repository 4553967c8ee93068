"""`npu-agent record`: what a host's drivers say, as a file that its owner can send.

Reads only, and opens no device node: of those it has names, types and numbers. Each read has a
deadline, and the whole has limits. What is known to tell one card, Pod or host from all others is
replaced: `npu_agent.people.commands.redaction`. The form of the file, and how it is read again:
`npu_agent.people.simulator.replay`.
"""

from __future__ import annotations

import argparse
import errno
import fnmatch
import gzip
import io
import os
import re
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from npu_agent import __version__
from npu_agent.cli import WRONG, CommandError, host_root
from npu_agent.people.commands.common import quiet
from npu_agent.people.commands.redaction import Redaction
from npu_agent.people.simulator import replay
from npu_agent.people.simulator.replay import FORMAT, LARGEST, MANIFEST, PATH, Manifest
from npu_agent.text import listed, printable, reason
from npu_agent.threads import DaemonThread
from npu_agent.vendors import PROFILE

T = TypeVar("T")

_DEADLINE = 1.0
"""Seconds for a read."""
_LONGEST = 60.0
"""Seconds for all reads."""
_ACTS = re.compile("reset|reboot$|remove|rescan|dump|trace|flash|erase|eeprom|power_sense")
"""Names of files that may do something when they are read."""
_OF_A_DEVICE = (
    *("vendor", "device", "class", "revision", "subsystem_vendor", "subsystem_device", "numa_node"),
    *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"),
    *("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal", "local_cpulist"),
)
"""What is read of a device on the PCI bus. Others of its files act: rom, config, vpd, resource0."""
_DMI = "sys/class/dmi/id"
_NUMA = "sys/devices/system/node"
_CGROUPS = "sys/fs/cgroup"
_OF_PODS = re.compile("kubelet|kubepods|burstable|besteffort|pod")
_KNOWN = (
    *PROFILE.files,
    *_OF_A_DEVICE,
    *("sys_vendor", "product_name", "online", "possible", "cpulist", "distance"),
    *("cgroup.controllers", "uevent", "modalias", "name"),
)
"""Files whose content is known, as globs: the vendor's parsers read them, or the kernel does."""
_MOST_UNKNOWN = 20
"""Names of other files that the summary has."""


def main(args: argparse.Namespace) -> int:
    """Writes the record to a new file, or to stdout for ``-``, and prints what is in it."""
    quiet(args)
    if args.show:
        _show(args.file)
        return 0
    if str(args.file) == "-" and sys.stdout.isatty():
        raise CommandError("-: a terminal cannot show a record; write it to a file", WRONG)
    host = _Host(host_root(args))
    host.take()
    redaction = Redaction(host.contents)
    recording = _packed(host, redaction)
    if str(args.file) == "-":
        sys.stdout.buffer.write(recording)
    else:
        try:
            with args.file.open("xb") as file:
                file.write(recording)
        except FileExistsError:
            raise CommandError(f"{args.file} is there already: give another name") from None
        except OSError as error:
            raise CommandError(f"cannot write the record: {reason(error)}") from error
    print("\n".join(_summary(host, args.file, len(recording), redaction)), file=sys.stderr)
    return 0


class _FullError(Exception):
    """A limit is reached; the message says which."""


class _Host:
    """What has been read of a host so far; paths are below its /. Fields: see `Manifest`."""

    def __init__(self, root: Path) -> None:
        self.contents: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.nodes: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.directories: set[str] = set()
        self.incomplete: str | None = None
        self._size = 0
        self._root = root
        self._until = time.monotonic() + _LONGEST
        self._thread = DaemonThread()

    def take(self) -> None:
        try:
            for driver in PROFILE.drivers:
                for name, _ in self._entries(driver.directory):
                    if real := self._follow(f"{driver.directory}/{name}"):
                        self._whole(real)
            for pattern in PROFILE.nodes:
                self._nodes(*f"dev/{pattern}".rsplit("/", 1))
            self._pci(f"0x{PROFILE.pci}".encode())
            self._files(self._follow(_DMI) or _DMI, ("sys_vendor", "product_name"))
            self._files(_NUMA, ("online", "possible"))
            for name, _ in self._entries(_NUMA):
                if re.fullmatch("node[0-9]{1,4}", name):
                    self._files(f"{_NUMA}/{name}", ("cpulist", "distance"))
            self._files(_CGROUPS, ("cgroup.controllers",))
            self._cgroups(_CGROUPS)
        except _FullError as error:
            self.incomplete = str(error)

    def _pci(self, vendor: bytes) -> None:
        """The vendor's devices, and the bridges above them."""
        for name, _ in self._entries("sys/bus/pci/devices"):
            path = f"sys/bus/pci/devices/{name}"
            said = self._asked(f"{path}/vendor", _content)
            if said and said.strip() == vendor and (real := self._follow(path)):
                self._whole(f"{real}/hwmon")
                self._follow(f"{real}/driver")
                while not (place := real.rpartition("/"))[2].startswith("pci") and place[0]:
                    self._files(real, _OF_A_DEVICE)
                    real = place[0]

    def _whole(self, directory: str, depth: int = 3) -> None:
        """Every file of a directory; links as they are."""
        for name, mode in self._entries(directory):
            path = f"{directory}/{name}"
            if stat.S_ISLNK(mode):
                self._follow(path)
            elif not stat.S_ISDIR(mode):
                self._file(path)
            elif depth and name != "power":  # the kernel's, of any device
                self._whole(path, depth - 1)

    def _files(self, directory: str, names: Iterable[str]) -> None:
        for name in sorted({name for name, _ in self._entries(directory)}.intersection(names)):
            self._file(f"{directory}/{name}")

    def _nodes(self, directory: str, pattern: str) -> None:
        for name, mode in self._entries(directory):
            if fnmatch.fnmatchcase(name, pattern) and not stat.S_ISDIR(mode):
                path = f"{directory}/{name}"
                if status := self._asked(path, Path.lstat):
                    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                    kind = stat.filemode(mode)[0]
                    rights = stat.S_IMODE(mode)
                    self.nodes[path] = f"{kind} {number} {rights:o}"

    def _cgroups(self, directory: str, depth: int = 3) -> None:
        """The directories of Pods and of those above them, without their files."""
        for name, mode in self._entries(directory):
            if depth and stat.S_ISDIR(mode) and _OF_PODS.match(name):
                self._cgroups(f"{directory}/{name}", depth - 1)

    def _follow(self, path: str) -> str | None:
        """Notes a link, and returns where it leads; the path itself if it is none."""
        target = self._asked(path, lambda at: str(at.readlink()) if at.is_symlink() else ".")
        if target is None or target == ".":
            return target and path
        if not replay.leads_within(path, target):
            self.unread[path] = "a link that leads out of /sys"
            return None
        self.links[path] = target
        return os.path.normpath(f"{path.rpartition('/')[0]}/{target}")

    def _file(self, path: str) -> None:
        if path in self.contents or path in self.unread:
            return
        if _ACTS.search(path.rpartition("/")[2]):
            self.unread[path] = "it may act when it is read"
        elif (content := self._asked(path, _content)) is not None:
            self.contents[path] = content
            self._size += len(content)

    def _entries(self, directory: str) -> list[tuple[str, int]]:
        """The names in a directory, and what each is; none if it is not there."""
        names = self._asked(directory, _scanned)
        if names is None:
            return []
        self.directories.add(directory)
        plain = [entry for entry in names if PATH.fullmatch(f"{directory}/{entry[0]}")]
        if len(plain) < len(names):
            self.unread[f"{directory}/*"] = "names that do not fit into a record"
        return plain

    def _asked(self, path: str, function: Callable[[Path], T]) -> T | None:
        """What a call with this path returns; None where it fails, with the reason in the record.

        Raises:
            _FullError: a limit is reached.
        """
        if len(self.contents) + len(self.links) + len(self.nodes) >= replay.MOST_FILES:
            raise _FullError(f"the host has more than {replay.MOST_FILES} files")
        if self._size + LARGEST > replay.MOST_BYTES:
            raise _FullError(f"its files have more than {replay.MOST_BYTES >> 20} MiB")
        if time.monotonic() > self._until:
            raise _FullError(f"its drivers take more than {_LONGEST:g} s to answer")
        call = self._thread.submit(partial(function, self._root / path))
        try:
            return call.result(_DEADLINE)
        except FileNotFoundError:
            pass  # unbound meanwhile, or not of this host
        except TimeoutError:
            self.unread[path] = "ETIMEDOUT"
            self._thread = DaemonThread()  # the other one is left to what hangs
        except OSError as error:
            self.unread[path] = errno.errorcode.get(error.errno or 0) or reason(error)
        return None


def _packed(host: _Host, redaction: Redaction) -> bytes:
    """The record: a gzipped tar of plain files, `record.json` first."""
    made_up = redaction.text
    contents = {
        made_up(path): redaction.content(path, content)
        for path, content in sorted(host.contents.items())
    }
    taken = (*host.contents, *host.links, *host.nodes, *host.directories)
    empty = host.directories - {path.rpartition("/")[0] for path in taken} - {"dev"}
    manifest = Manifest(
        format=FORMAT,
        agent=__version__,
        kernel=made_up(f"{os.uname().release} {os.uname().machine}"),
        files=len(contents),
        incomplete=host.incomplete,
        directories=tuple(sorted(map(made_up, empty))),
        links={made_up(path): made_up(target) for path, target in host.links.items()},
        nodes={made_up(path): node for path, node in host.nodes.items()},
        unread={made_up(path): made_up(why) for path, why in host.unread.items()},
    )
    text = msgspec.json.format(msgspec.json.encode(manifest))
    packed = io.BytesIO()

    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name, content in ((MANIFEST, text), *contents.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _summary(host: _Host, file: Path, size: int, redaction: Redaction) -> Iterator[str]:
    """What is in the record, for people, a line each."""
    yield f"{file}: {len(host.contents)} files of this host, {size} bytes"
    yield f"names, types and numbers of {len(host.nodes)} device nodes"
    yield (
        f"replaced by made-up ones: {redaction.count} serial numbers, UUIDs, addresses and host "
        "names: the known ones"
    )
    names = {path.rpartition("/")[2] for path in host.contents if not _is_known(path)}
    if names:
        unknown = printable(listed(map(redaction.text, sorted(names)), _MOST_UNKNOWN))
        yield f"npu-agent does not know these files, and they may have others: {unknown}"
    if host.unread:
        yield f"not read: {len(host.unread)}; {MANIFEST} says why"
    if host.incomplete:
        yield f"not complete: {host.incomplete}"
    if str(file) != "-":
        yield f"look into it before you send it: npu-agent record --show {file}"
        yield f"see what it shows: npu-agent simulate NEW-DIRECTORY --from {file}"


def _is_known(path: str) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(name, known) for known in _KNOWN)


def _show(file: Path) -> None:
    """Prints all that is in a record, file by file.

    Raises:
        CommandError: it cannot be read, or is no record.
    """
    try:
        recording = replay.load(file)
    except replay.RecordingError as error:
        raise CommandError(str(error), WRONG) from error
    contents = {MANIFEST: msgspec.json.format(msgspec.json.encode(recording.manifest))}
    for path, content in (contents | dict(recording.contents)).items():
        is_known = path == MANIFEST or _is_known(path)
        print(f"== {path}" if is_known else f"== {path} (npu-agent does not know this file)")
        print(printable(content.decode("utf-8", "backslashreplace")).rstrip("\n"))


def _content(path: Path) -> bytes:
    """The first bytes of a file, as many as the agent reads; raises OSError."""
    # Unlike `files.content` this waits for what hangs: the record has to say so.
    mode = path.lstat().st_mode
    if not stat.S_IMODE(mode) & 0o444:
        raise OSError(0, "it is write-only")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise OSError(errno.EIO, "not a file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.read(descriptor, LARGEST)
    finally:
        os.close(descriptor)


def _scanned(directory: Path) -> list[tuple[str, int]]:
    with os.scandir(directory) as entries:
        return sorted((entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries)
