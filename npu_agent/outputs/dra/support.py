"""Whether this node can do DRA: what `allocation.api: auto` follows, and `doctor` reports."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace

from npu_agent.backoff import Backoff
from npu_agent.feed import Feed
from npu_agent.kube import Api, ApiError, dra, node
from npu_agent.logs import logger

log = logger(__name__)

OLDEST = (1, 34)
"""The first Kubernetes in which DRA is generally available."""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether DRA can be used here."""

    available: bool
    reason: str


async def support(api: Api, node_name: str) -> Support:
    """Asks the API server about itself and this node's kubelet; raises ApiError."""
    if not await dra.served(api):
        return Support(False, "the API server does not serve resource.k8s.io/v1")
    version = (await node.read_whole(api, node_name)).status.node_info.kubelet_version
    if not takes_drivers(version):
        oldest = ".".join(map(str, OLDEST))
        return Support(
            False, f"this node's kubelet is {version or 'unknown'}, and DRA needs {oldest} or later"
        )
    return Support(True, f"the API server serves resource.k8s.io/v1, and the kubelet is {version}")


def takes_drivers(version: str) -> bool:
    """Whether a kubelet of this version, ``v1.36.3``, takes a driver of DRA v1."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= OLDEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The DRA support of this node, as far as it is known."""

    available: bool | None = None
    """Whether `auto` stands for DRA; None: not known."""
    impossible: str | None = None
    """Why `dra` cannot be followed; "": it can; None: not known."""
    waits: str = ""
    """Why `auto` has not been settled; empty: it has, or nothing asks for it."""


class SupportWatch:
    """Finds out whether this node can do DRA, if the config asks for it.

    `auto` is settled once. An impossible `dra` is asked again: clusters are updated while agents
    run.
    """

    def __init__(
        self, api: Api, node_name: str | None, *, auto: bool, dra: bool, ask_again: float
    ) -> None:
        """`auto` and `dra`: whether the config has them for this node; `ask_again` in seconds."""
        self._asks = node_name is not None and (auto or dra)
        waits = "the API server has not answered yet" if self._asks and auto else ""
        self.state = Feed(Known(available=None if self._asks else False, waits=waits))
        self._api = api
        self._node_name = node_name or ""
        self._auto = auto
        self._dra = dra
        self._ask_again = ask_again

    async def run(self) -> None:
        pause = Backoff()
        while self._asks:
            try:
                answer = await support(self._api, self._node_name)
            except ApiError as error:
                log.warning(
                    "cannot tell yet whether this node supports DRA; retrying", reason=error
                )
                if self.state.value.waits:
                    self.state.publish(replace(self.state.value, waits=str(error)))
                await asyncio.sleep(pause.next(error.retry_after))
                continue
            self._settle(answer)
            if answer.available or not self._dra:
                break
            await asyncio.sleep(self._ask_again)
        await asyncio.Event().wait()

    def _settle(self, answer: Support) -> None:
        available = self.state.value.available
        if available is None:
            available = answer.available
            if self._auto:
                chosen = "dra" if available else "device-plugin"
                log.info("allocation.api is auto", chosen=chosen, reason=answer.reason)
        impossible = "" if answer.available else answer.reason
        self.state.publish(Known(available=available, impossible=impossible))
