"""The one watch of our own Node: what others say of it there, as a small value."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from npu_agent.feed import Feed
from npu_agent.kube import follow
from npu_agent.kube.client import Api, WatchEvent
from npu_agent.kube.errors import ApiError
from npu_agent.kube.follow import WatchTiming
from npu_agent.kube.node import ThisNode
from npu_agent.kube.request import Request
from npu_agent.logs import Reporter, logger
from npu_agent.supervise import background

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """The watched parts of our Node; the rest of it changes much more often."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    unschedulable: bool
    """Whether it is cordoned."""
    conditions: Mapping[str, str]
    """By type, the status: ``True``, ``False`` or ``Unknown``."""


class NodeWatch:
    """Keeps `state` true while `wanted`: the Node as it was seen last, None before that.

    Where the API server is away, or the Node is deleted, the last value stays.
    """

    def __init__(
        self,
        api: Api,
        node_name: str | None,
        wanted: Feed[bool],
        timing: WatchTiming | None = None,
    ) -> None:
        """Asks nothing yet; without a name it never does."""
        self.state: Feed[OwnNode | None] = Feed(None)
        self._api = api
        self._node_name = node_name
        self._wanted = wanted
        self._timing = timing or WatchTiming()
        self._reporter = Reporter(
            log,
            "changes of this Node are not seen; retrying",
            "changes of this Node are seen again",
        )

    @property
    def error(self) -> str | None:
        """Why the Node cannot be followed, with the remedy; None while nothing is wrong."""
        return self._reporter.reason

    async def run(self) -> None:
        """Follows the Node until cancelled; without a name it has nothing to do."""
        if (name := self._node_name) is None:
            await asyncio.Event().wait()
            return
        only = {"fieldSelector": f"metadata.name={name}"}
        while True:
            await self._wanted.until(bool)
            async with background(
                follow.follow(
                    self._api,
                    Request("watch", "Node", ThisNode, query=only),
                    follow.WatchHooks(
                        see=self._see,
                        opened=self._reporter.works,
                        failed=self._failed,
                    ),
                    self._timing,
                )
            ):
                await self._wanted.until(lambda wanted: not wanted)
            self._reporter.works()

    def _see(self, event: WatchEvent) -> None:
        if event.type != "DELETED":
            self.state.publish(_followed(event.object))

    def _failed(self, _doing: str, error: ApiError, trouble: bool) -> None:
        if trouble:
            self._reporter.failed(error)


def _followed(node: ThisNode) -> OwnNode:
    return OwnNode(
        labels=node.metadata.labels,
        annotations=node.metadata.annotations,
        unschedulable=node.spec.unschedulable,
        conditions={condition.type: condition.status for condition in node.status.conditions},
    )
