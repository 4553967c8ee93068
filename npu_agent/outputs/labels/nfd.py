"""Labels through Node Feature Discovery: a feature file that its worker on this node reads.

Format: the "local" feature source of NFD; docs/labels.md lists the settings of NFD that matter.
Lines of ``key=value`` and nothing else: before 0.14 NFD took comments for labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from npu_agent import files
from npu_agent.outputs.labels.labeller import OutputError

FILE = Path("etc/kubernetes/node-feature-discovery/features.d/npu-agent")
"""Below the host root."""

_LARGEST = 2**16
"""Bytes: NFD ignores larger files."""


class NfdOutput:
    """Keeps the feature file; all of it is ours, and there is none while there are no labels."""

    name: Literal["api", "nfd"] = "nfd"

    def __init__(self, host_root: Path, *, deadline: float = 5.0) -> None:
        self.path = host_root / FILE
        self._deadline = deadline
        self._last: Mapping[str, str] | None = None

    async def put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        async with self._explained():
            done = await self._put(labels, careful=careful)
        if not done["left"]:
            self._last = dict(labels)
        return done

    async def clear(self) -> frozenset[str]:
        async with self._explained():
            before = parse(await self._content())
            await files.replace(self.path, None, deadline=self._deadline)
        return frozenset(before)

    async def _put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        before = parse(await self._content())
        wrong = {key for key, text in labels.items() if before.get(key) != text}
        gone = before.keys() - labels.keys()
        if not wrong and not gone:
            return Counter()
        if careful and before:
            return Counter(left=len(wrong | gone))
        content = render(labels)
        try:
            await files.replace(
                self.path, content, make_directory=False, durable=True, deadline=self._deadline
            )
        except FileNotFoundError:
            raise OutputError(
                f"{self.path.parent} is missing: install Node Feature Discovery on this node and "
                "mount that directory here, or set labels.output to api",
                kind="no_directory",
            ) from None
        how = "put_back" if labels == self._last else "written"
        return Counter({how: len(wrong), "removed": len(gone)})

    async def _content(self) -> bytes | None:
        try:
            return await files.read(self.path, _LARGEST, follow=False, deadline=self._deadline)
        except (FileNotFoundError, files.LinkError):
            return None

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise OutputError(
                f"{self.path}: {error.strerror}: check that file system", kind="timeout"
            ) from error
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be replaced: {error.strerror or error}: mount its directory "
                "here and make it writable for the agent, or set labels.output to api",
                kind="unwritable",
            ) from error


def render(labels: Mapping[str, str]) -> bytes | None:
    lines = [f"{key}={text}\n" for key, text in sorted(labels.items())]
    return "".join(lines).encode() or None


def parse(content: bytes | None) -> dict[str, str]:
    """The labels that NFD finds in a feature file."""
    labels = {}
    for line in (content or b"").decode(errors="replace").split("\n"):
        key, equals, text = line.strip().partition("=")
        if key and not key.startswith("#"):
            labels[key] = text if equals else "true"
    return labels
