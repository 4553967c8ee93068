"""Versions as drivers write them: any text, of which the forms that were seen are understood."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(
    r"(?P<version>[^~(+]*)"
    r"(?:~(?P<after_tilde>[^+]*)|\((?P<in_brackets>[^()]*)\)\s*)?"
    r"(?:\+(?P<build>[^+]*))?"
)
_NUMBERS = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9})(?:\.([0-9]{1,9}))?)?\b")
_NUMBER = r"(?:0|[1-9][0-9]*)"
_IDENTIFIER = rf"(?:{_NUMBER}|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"
_RELEASE = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_IDENTIFIER}(?:\.{_IDENTIFIER})*)?")
_BUILD = re.compile(r"[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*")
"""Both of semver.org, version 2.0.0."""


@dataclass(frozen=True, slots=True)
class DriverVersion:
    """The parts of a version's text, each stripped; empty where there is none."""

    version: str
    """All before prerelease and commit; the whole text where that is in no known form."""
    prerelease: str
    commit: str

    @classmethod
    def of(cls, text: str) -> DriverVersion:
        """Takes any text apart.

        Forms that were seen: ``1.9.2, 3def9c2``, ``2025.4.0~dev0, 7e25130``,
        ``2026.1.0(rc0), 5b172ac`` and ``0.0.16+b4a67ca``.
        """
        front, _, commit = text.partition(",")
        match = _FORM.fullmatch(front.strip())
        if match is None:
            return cls(front.strip(), "", commit.strip())
        prerelease = match["after_tilde"] or match["in_brackets"] or ""
        return cls(
            match["version"].strip(), prerelease.strip(), commit.strip() or match["build"] or ""
        )

    @property
    def numbers(self) -> tuple[str | None, str | None, str | None]:
        """Major, minor and patch: the whole numbers that the version begins with."""
        match = _NUMBERS.match(self.version)
        return match.groups() if match else (None, None, None)  # type: ignore[return-value]

    @property
    def semver(self) -> str | None:
        """As a semantic version; None: it is none, and what order it has is not known.

        A commit that no semantic version can have is left out: it has no part in the order.
        """
        release = f"{self.version}-{self.prerelease}" if self.prerelease else self.version
        if not _RELEASE.fullmatch(release):
            return None
        return f"{release}+{self.commit}" if _BUILD.fullmatch(self.commit) else release
