"""What `npu-agent record` replaces, so that its file tells no card or host from all others.

Three kinds of text are replaced, everywhere the same one by the same made-up one:

- **Words of identity files**: those that the vendor's profile names, and files whose name says that
  they have an identity, such as ``board_serial``. All their words are replaced where they stand,
  and those that look like an identity are replaced in every other file, too.
- **What has a form**: UUIDs, MAC and IP addresses, and what follows ``SN:`` or ``serial number:``.
- **The host's names.**

A text that is none of these cannot be known: people have to look, with ``npu-agent record --show``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from npu_agent.vendors import PROFILE, SPEC

_NAMED_SO = re.compile(r"serial|(?:_|/)sn(?:/|$)|mac|asset", re.IGNORECASE)
"""Paths of files that a driver may have in addition to the known ones."""
_FAMILIES = {family.encode() for family in SPEC.families}
"""Words that a host may be called, and that a record needs."""

_SHORTEST = 4
"""Characters of a word that is searched in other files: shorter ones are in any text."""
_SHORTEST_PART = 6
"""The same within longer words."""
_SEARCHED = 1024
"""Bytes of an identity file whose words are searched in other files: a driver answers with few."""

_UUID = rb"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}"
_PLAIN_UUID = rb"(?:(?<=pod)|(?<![0-9a-f]))[0-9a-f]{32}(?![0-9a-f])"
"""Without dashes, as that of a static Pod."""
_MAC = rb"[0-9a-f]{2}(?:(?::[0-9a-f]{2}){5,19}|(?:-[0-9a-f]{2}){5})"
"""Of Ethernet, and the longer ones of other networks."""
_IPV4 = rb"(?<![0-9])(?<![0-9]\.)(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?[0-9])"
_IPV6 = (
    rb"(?<![0-9a-z])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}"
    rb"|[0-9a-f:]{0,39}::[0-9a-f:]{1,39}(?:\.[0-9]{1,3}){0,3})(?![0-9a-z:])"
)
_LABELLED = re.compile(
    rb"(?:(?<![0-9a-z])s/?n|serial(?:[ _-]?(?:number|num|no)\.?)?|asset(?:[ _-]?tag)?)"
    rb"[ \t:=#\"']{1,9}(?=[^\s\0]{0,99}[0-9])([^\s\0\"',;]{4,})",
    re.IGNORECASE,
)
"""What is likely an identity, in any file: ``PCB SN: BRD-1``."""
_WORD = re.compile(rb"[^\s\0]+")
_SEPARATORS = re.compile(rb"[\s:=,;\"'()\[\]|/]+")


def is_identity(path: str) -> bool:
    """Whether the file at this path, by its name, has an identity and nothing else."""
    return path.rpartition("/")[2] in PROFILE.identities or bool(_NAMED_SO.search(path))


class Redaction:
    """Made-up names in place of identities: the same one for the same one, in any letters."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """`contents` has what each file of the host said, by its path."""
        self._made: dict[bytes, bytes] = {}
        words = set(_host_names())
        parts: set[bytes] = set()
        for path, content in contents.items():
            labelled = {match[1] for match in _LABELLED.finditer(content)}
            for word in (*labelled, *(_searched(content) if is_identity(path) else ())):
                # A word without a digit may be a part of any other: a company's name is.
                is_part = len(word) >= _SHORTEST_PART and re.search(rb"[0-9]", word)
                (parts if is_part else words).add(word.lower())
        alternatives = (
            _UUID,
            _PLAIN_UUID,
            _MAC,
            _IPV4,
            _IPV6,
            _any_of(parts),
            rb"(?<![0-9a-z])%b(?![0-9a-z])" % _any_of(words),
        )
        self._pattern = re.compile(rb"|".join(alternatives), re.IGNORECASE)

    @property
    def count(self) -> int:
        """How many have been replaced so far."""
        return len(self._made)

    def content(self, path: str, content: bytes) -> bytes:
        """What a record says in place of the content of a file."""
        pattern = _WORD if is_identity(path) else self._pattern
        return pattern.sub(lambda match: self._name(match[0]), content)

    def text(self, text: str) -> str:
        """The same for a path, or for another text about the host."""
        return os.fsdecode(self.content("", os.fsencode(text)))

    def _name(self, identity: bytes) -> bytes:
        """The made-up one, of the same form: what a parser takes or refuses, it does again."""
        key = identity.lower()
        number = len(self._made) + 1
        octets = number.to_bytes(3, "big")
        uuid = f"00000000-0000-4000-8000-{number:012}"
        if re.fullmatch(_UUID, key):
            made = uuid.replace("-", chr(key[8]))
        elif re.fullmatch(_PLAIN_UUID, key):
            made = uuid.replace("-", "")
        elif re.fullmatch(_MAC, key):
            made = (b"\x02\x00\x00" + octets).hex(chr(key[2]))
        elif re.fullmatch(_IPV4, key):
            made = ".".join(map(str, (10, *octets)))
        elif re.fullmatch(_IPV6, key):
            made = f"fd00::{number:x}"
        elif key.isascii() and key.decode("ascii").isprintable():
            made = f"S{number:0{max(3, len(key) - 1)}}"
        else:
            return b"\xff" * len(key)
        return self._made.setdefault(key, made.encode())


def _host_names() -> Iterator[bytes]:
    for name in (os.uname().nodename, os.environ.get("NODE_NAME", "")):
        yield from {os.fsencode(name).lower(), os.fsencode(name.partition(".")[0]).lower()}


def _searched(content: bytes) -> Iterator[bytes]:
    """The words of an identity file that may be in other files, too, and the parts of these."""
    for line in re.split(rb"[\r\n\0]+", content[:_SEARCHED].strip(b"\r\n\0")):
        for words in (line.split(), _SEPARATORS.split(line)):
            # A word without a digit is likely a label, unless it stands last: "PCB SN: BRDX".
            yield from (word for word in words if word is words[-1] or re.search(rb"[0-9]", word))


def _any_of(words: Iterable[bytes]) -> bytes:
    """A pattern of the words, the long ones first; of none it matches nothing."""
    fit = {
        word
        for word in words
        if len(word) >= _SHORTEST and word.strip(b"0") and word not in {*_FAMILIES, b"localhost"}
    }
    longest_first = sorted(fit, key=lambda word: (-len(word), word))
    return rb"(?:%b)" % (b"|".join(map(re.escape, longest_first)) or rb"(?!)")
