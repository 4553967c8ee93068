"""A host's recording: what `npu-agent record` wrote, checked, as a picture of its driver tree.

A gzipped tar of plain files: `record.json` first, then what each file of the host said, by its path
below /. Links and device nodes are lines of `record.json` alone. Nothing in it is believed: a user
sent it. What is not of this form is refused as a whole, before a file is written.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, cast

from npu_agent import files, typedjson
from npu_agent.people.simulator.picture import Content, Link, Picture, Special
from npu_agent.text import quoted, reason

FORMAT = 1
MANIFEST = "record.json"
LARGEST = 64 << 10
"""Bytes of a file: drivers answer with a page at most."""
MOST_FILES = 20_000
"""A host with eight cards has some 1,500 files, most of them of a line."""
MOST_BYTES = 16 << 20
"""Of all files together."""
_LARGEST_MANIFEST = 4 << 20
_LARGEST_TAR = _LARGEST_MANIFEST + MOST_BYTES + MOST_FILES * 2 * tarfile.BLOCKSIZE
_PART = r"(?!\.{1,2}(?:/|$))[!-.0-~]{1,128}"
PATH = re.compile(rf"(?:sys|dev)(?:/{_PART}){{1,24}}")
_TARGET = re.compile(rf"(?:\.\./)*{_PART}(?:/{_PART})*")
_IN_PLACE_OF_UNREAD: Mapping[str, Content] = {
    # Mode bits do not stop root: the simulator's files that refuse are empty.
    "EACCES": b"",
    "EPERM": b"",
    "ETIMEDOUT": Special.FIFO,
    "EIO": Special.DIRECTORY,
    "EBUSY": Special.DIRECTORY,
}


class RecordingError(ValueError):
    """A file cannot be used as a recording; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`record.json`; paths are below the host's /."""

    format: int
    agent: str
    """The version of npu-agent that wrote it."""
    kernel: str
    files: int
    incomplete: str | None = None
    """Why it has less than it should; None: it has all."""
    directories: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    """Type, number and mode of each device node: ``c 508:0 666``."""
    unread: dict[str, str] = field(default_factory=dict)
    """Why a file was not read: the name of an error, or words."""


@dataclass(frozen=True)
class Recording:
    """A recording that has been checked."""

    manifest: Manifest
    contents: Mapping[str, bytes]

    def picture(self) -> Picture:
        """The tree that shows the same, also where a file could not be read, or hung."""
        manifest = self.manifest
        unread = {
            path: _IN_PLACE_OF_UNREAD[why]
            for path, why in manifest.unread.items()
            if why in _IN_PLACE_OF_UNREAD
        }
        links = {path: Link(target) for path, target in manifest.links.items()}
        return {**self.contents, **unread, **links, **dict.fromkeys(manifest.nodes, Special.NODE)}


def load(path: Path) -> Recording:
    """Reads a recording and checks all of it.

    Raises:
        RecordingError: it cannot be read, is damaged, hostile, or of another version.
    """
    try:
        return _load(path)
    except OSError as error:
        raise RecordingError(f"cannot read the record: {reason(error)}") from error
    except RecordingError as error:
        raise RecordingError(
            f"{path} cannot be used as a record: {error}; ask its sender for a new one by "
            "`npu-agent record`"
        ) from None


def _load(path: Path) -> Recording:
    contents: dict[str, bytes] = {}
    with os.fdopen(files.regular(path, os.O_RDONLY), "rb") as file:
        members = _members(file)
        manifest = _manifest(*next(members, ("", b"")))
        for name, content in members:
            if name in contents:
                raise RecordingError(f"{quoted(name)} is in it twice")
            contents[name] = content
    if len(contents) != manifest.files:
        raise RecordingError(f"it has {len(contents)} files in place of {manifest.files}")
    recording = Recording(manifest, contents)
    _check(recording)
    return recording


class _Member(tarfile.TarInfo):
    """Without extended headers: tarfile searches those with patterns that may take for ever."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        file = cast("BinaryIO", tar.fileobj)
        header = file.read(512)
        file.seek(-len(header), io.SEEK_CUR)
        if header[156:157] in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
            raise RecordingError("an entry with an extended header is not a plain file")
        return super().fromtarfile(tar)


def _members(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """The files of the tar, one after the other."""
    try:
        plain = io.BytesIO(_unpacked(file))
        with tarfile.open(fileobj=plain, mode="r:", tarinfo=_Member) as tar:
            for count, member in enumerate(tar):
                yield member.name, _content(tar, member, count)
    except RecordingError:
        raise
    except (EOFError, OSError, ValueError, tarfile.TarError, zlib.error) as error:
        raise RecordingError("it is damaged or cut off, or no gzipped tar") from error
    except RecursionError as error:
        raise RecordingError("its long names are within each other") from error


def _unpacked(file: BinaryIO) -> bytes:
    """The tar within the one gzip member that a recording is."""
    # Not `gzip`, which reads on for as many members as there are, each in its own loop of Python.
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    plain = unpacker.decompress(file.read(_LARGEST_TAR), _LARGEST_TAR + 1)
    if len(plain) > _LARGEST_TAR:
        raise RecordingError(f"it has more than {_LARGEST_TAR >> 20} MiB")
    if not unpacker.eof:
        raise EOFError
    if unpacker.unused_data:
        raise RecordingError("something follows the end of its gzip member")
    return plain


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, count: int) -> bytes:
    name = quoted(member.name)
    most = LARGEST if count else _LARGEST_MANIFEST

    if count > MOST_FILES:
        raise RecordingError(f"it has more than {MOST_FILES} files")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise RecordingError(f"{name} is not a plain file")
    if member.size > most:
        raise RecordingError(f"{name} has more than {most} bytes")
    content = tar.extractfile(member)
    return content.read() if content else b""


def _manifest(name: str, content: bytes) -> Manifest:
    if name != MANIFEST:
        raise RecordingError(f"its first file is not {MANIFEST}")
    try:
        version = typedjson.decode(content, _Version)
        if version.format != FORMAT:
            raise RecordingError(
                f"npu-agent {quoted(version.agent, 20)} wrote it in format {version.format}, and "
                f"this one reads {FORMAT}"
            )
        return typedjson.decode(content, Manifest)
    except typedjson.InvalidJsonError as error:
        raise RecordingError(f"{MANIFEST}: {error}") from None


@dataclass(frozen=True)
class _Version:
    format: int
    agent: str


def _check(recording: Recording) -> None:
    """Refuses every path that is not plainly below /sys, or for a node below /dev."""
    manifest = recording.manifest
    below_both = (*manifest.directories, *manifest.unread)
    for top, paths in (
        ("sys/", (*recording.contents, *manifest.links)),
        ("dev/", manifest.nodes),
        ("", below_both),
    ):
        for path in paths:
            if not PATH.fullmatch(path) or not path.startswith(top):
                raise RecordingError(f"{quoted(path)} is not a path below /{top or 'sys/'}")
    for path, target in manifest.links.items():
        if not leads_within(path, target):
            raise RecordingError(f"the link {quoted(path)} leads to {quoted(target)}")
    leaves = recording.picture()
    directories = {*manifest.directories}
    for path in (*leaves, *manifest.directories):
        directories.update(map(str, PurePosixPath(path).parents))
        if len(leaves) + len(directories) > 2 * MOST_FILES:
            raise RecordingError(f"it has more than {2 * MOST_FILES} files and directories")
    if both := directories & leaves.keys():
        raise RecordingError(f"{quoted(min(both))} is a file and a directory")


def leads_within(path: str, target: str) -> bool:
    """Whether a link at `path` plainly leads to a place below /sys."""
    above = len(PurePosixPath(path).parent.parts) - 1
    return bool(_TARGET.fullmatch(target)) and target.count("../") <= above
