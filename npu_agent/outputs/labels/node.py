"""Labels on our own Node through the API server: server-side apply, and only where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from npu_agent.kube import Api, ApiError, ErrorKind, NodeMeta, node
from npu_agent.outputs.labels.labeller import OutputError

NO_NODE_NAME = (
    "NODE_NAME is not set: set it from spec.nodeName by the downward API as k8s/daemonset.yaml "
    "does, or set labels.output to none"
)
_SELDOM = 3600.0
"""Seconds between two log lines about a fault that needs a restart."""


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
        meta, drift = self._node, labels == self._in_place
        # The API server's cache may be a moment behind our own last write. With labels that change
        # back and forth it would show what is wanted and is no longer there.
        checks = meta is None or drift
        if meta is None or checks:
            meta = self._node = await node.read(self._api, name)
        wrong = {key for key, value in labels.items() if meta.labels.get(key) != value}
        gone = meta.applied - labels.keys()
        # The right value under another owner would stay behind when it no longer applies.
        theirs = labels.keys() - meta.applied - wrong
        if checks and not (wrong or gone or theirs):
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
