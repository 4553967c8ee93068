"""The places where labels go: our own Node, or a feature file of Node Feature Discovery.

The file is for NFD's "local" feature source, whose worker on this node reads it;
docs/labels.md lists the settings of NFD that matter. It has lines of ``key=value`` and nothing
else: before 0.14 NFD took comments for labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, Protocol

from npu_agent import files
from npu_agent.kube import Api, ApiError, ErrorKind, NodeMeta, node

NO_NODE_NAME = (
    "NODE_NAME is not set: set it from spec.nodeName by the downward API as k8s/daemonset.yaml "
    "does, or set labels.output to none"
)
_SELDOM = 3600.0
"""Seconds between two log lines about a fault that needs a restart."""
FILE = Path("etc/kubernetes/node-feature-discovery/features.d/npu-agent")
"""Below the host root."""

_LARGEST_FILE = 2**16
"""Bytes: NFD ignores larger files."""


class OutputError(Exception):
    """The labels cannot be written now: reason and remedy, and a `kind` for the metric."""

    def __init__(self, message: str, *, kind: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


class Output(Protocol):
    """A place where labels go."""

    name: Literal["api", "nfd"]

    async def put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        """Makes `labels`, and nothing else, ours in that place; writes only what differs.

        With `careful`, our labels that are there stay as they are: `labels` may be incomplete.
        Returns what was done, as counts of ``written``, ``put_back``, ``removed`` and ``left``
        labels; all 0 where everything was in place.

        Raises:
            OutputError: it could not be done.
        """


def output_of(
    output: str, *, api: Api, node_name: str | None, host_root: Path
) -> NodeOutput | NfdOutput | None:
    """The place that the config's labels.output names; None for none."""
    match output:
        case "api":
            return NodeOutput(api, node_name)
        case "nfd":
            return NfdOutput(host_root)
    return None


class NodeOutput:
    """Applies labels to one Node. What others put there is theirs: only our keys are written."""

    name: Literal["api", "nfd"] = "api"

    def __init__(self, api: Api, node_name: str | None) -> None:
        """`node_name` None: each `put` fails and names the remedy."""
        self._api = api
        self._node_name = node_name
        self._node: NodeMeta | None = None
        """The Node as the API server answered last; None: it has to be read."""
        self._in_place: Mapping[str, str] | None = None
        """The last labels seen there; None: a write may have taken effect since."""

    async def put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        name = self._named()
        try:
            return await self._put(name, labels, careful=careful)
        except ApiError as error:
            # A uid that is another one now is refused as a change of what cannot change (422).
            if error.kind in (ErrorKind.NOT_FOUND, ErrorKind.CONFLICT, ErrorKind.REFUSED):
                self._node = None
            raise _unavailable(error) from error

    async def _put(self, name: str, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        drift = labels == self._in_place
        # The API server's cache may be a moment behind our own last write. With labels that change
        # back and forth it would show what is wanted and is no longer there.
        written = None if drift else self._node
        meta = self._node = written or await node.read(self._api, name)
        wrong = {key for key, value in labels.items() if meta.labels.get(key) != value}
        gone = meta.applied - labels.keys()
        # The right value under another owner would stay behind when it no longer applies.
        theirs = labels.keys() - meta.applied - wrong
        if not (written or wrong or gone or theirs):
            self._in_place = labels
            return Counter()
        if careful and meta.applied:
            return Counter(left=len(wrong | gone))
        self._in_place = None
        self._node = await node.apply_labels(self._api, meta, labels)
        refused = sorted(k for k, v in labels.items() if self._node.labels.get(k) != v)
        if refused:
            raise OutputError(
                f"the API server accepted the labels of Node {name}, but {', '.join(refused)} "
                "differ: check for an admission webhook that changes them",
                kind="overruled",
            )
        self._in_place = labels
        how = "put_back" if drift else "written"
        return Counter({how: len(wrong | theirs), "removed": len(gone)})

    async def clear(self) -> frozenset[str]:
        try:
            meta = await node.read(self._api, self._named())
            after = await node.apply_labels(self._api, meta, {}) if meta.applied else meta
        except ApiError as error:
            raise _unavailable(error) from error
        return meta.applied - after.applied

    def _named(self) -> str:
        if not self._node_name:
            raise OutputError(NO_NODE_NAME, kind="no_node_name", retry_after=_SELDOM)
        return self._node_name


def _unavailable(error: ApiError) -> OutputError:
    return OutputError(str(error), kind=error.kind.value, retry_after=error.retry_after)


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
            return await files.read(self.path, _LARGEST_FILE, follow=False, deadline=self._deadline)
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
