"""Labels by way of Node Feature Discovery: a feature file that its worker on this node reads.

Format: the "local" feature source of NFD, docs/labels.md tells which of its settings matter. Lines
of ``key=value`` and nothing else: before 0.14 NFD took comments for labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from npu_agent import files
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.outputs.labels.labeller import UnavailableError

FILE = Path("etc/kubernetes/node-feature-discovery/features.d/npu-agent")
"""Below the host root."""

_DEADLINE = 5.0


class NfdOutput:
    """Keeps the feature file; all of it is ours, and there is none while there are no labels."""

    name: Literal["api", "nfd"] = "nfd"

    def __init__(self, host_root: Path) -> None:
        self.path = host_root / FILE
        self._reader = Reader("npu-nfd")
        self._last: Mapping[str, str] | None = None
        """What was put last by this process."""

    def changed(self) -> None:
        """See `Output.changed`. The file itself is looked at each time: there is no cache."""

    async def put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        """See `Output.put`."""
        done = await self._blocking(lambda: self._put(labels, careful=careful))
        if not done["left"]:
            self._last = dict(labels)
        return done

    async def clear(self) -> frozenset[str]:
        """Takes the file away; returns the keys that were in it.

        Raises:
            UnavailableError: it could not be done.
        """
        before: list[str] = []

        def clear() -> Counter[str]:
            before.extend(parse(_content(self.path)))
            files.replace(self.path, None)
            return Counter()

        await self._blocking(clear)
        return frozenset(before)

    def _put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        wanted, there = render(labels), _content(self.path)
        if wanted == there:
            return Counter()
        before = parse(there)
        wrong = {key for key, text in labels.items() if before.get(key) != text}
        gone = before.keys() - labels.keys()
        if careful and before:
            return Counter(left=len(wrong | gone))
        if wanted is not None and not self.path.parent.is_dir():
            raise UnavailableError(
                f"{self.path.parent} is missing: install Node Feature Discovery on this node and "
                "mount that directory here, or set labels.output to api",
                kind="no_directory",
            )
        files.replace(self.path, wanted)
        how = "put_back" if labels == self._last else "written"
        if not wrong and not gone:
            wrong = set(labels)  # the lines were in disorder
        return Counter({how: len(wrong), "removed": len(gone)})

    async def _blocking(self, work: Callable[[], Counter[str]]) -> Counter[str]:
        try:
            return await self._reader.call(work, deadline=_DEADLINE)
        except HungError as error:
            raise UnavailableError(
                f"{self.path}: {error}: does that file system still work?", kind="timeout"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"{self.path} cannot be replaced: {error.strerror or error}: mount its directory "
                "here and let us write there, or set labels.output to api",
                kind="unwritable",
            ) from error


def render(labels: Mapping[str, str]) -> bytes | None:
    """The feature file for these labels; None: there should be none."""
    lines = [f"{key}={text}\n" for key, text in sorted(labels.items())]
    return "".join(lines).encode() or None


def parse(content: bytes | None) -> dict[str, str]:
    """The labels that NFD finds in a feature file."""
    found = {}
    for line in (content or b"").decode(errors="replace").split("\n"):
        key, equals, text = line.strip().partition("=")
        if key and not key.startswith("#"):
            found[key] = text if equals else "true"
    return found


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
