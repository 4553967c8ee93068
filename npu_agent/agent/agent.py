"""Agent: the parts of one node's agent, and its state made of them.

`npu_agent.agent.parts` builds each part, `npu_agent.agent.run` runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

from npu_agent import __version__
from npu_agent.agent import parts
from npu_agent.agent.parts import AgentTiming, Common, Host
from npu_agent.config import Effective, Poller
from npu_agent.core import plan
from npu_agent.core.ledger import Ledger
from npu_agent.core.state import (
    AgentState,
    DraState,
    Invocation,
    ResourceState,
    SessionPhase,
    stale_after,
)
from npu_agent.feed import Feed, changes_of
from npu_agent.kube import Api
from npu_agent.kubelet.record import read_record, recover
from npu_agent.vendors import SPEC

_KUBELET_FIRST = 1.0
"""Seconds, at most, that the API server is asked later for the kubelet's sake."""


class Agent:
    """The agent of one node."""

    def __init__(
        self,
        effective: Effective,
        host: Host,
        *,
        config_file: Path | None = None,
        api: Api | None = None,
        timing: AgentTiming | None = None,
    ) -> None:
        """Builds the parts; nothing runs yet.

        Args:
            effective: the config to start with.
            host: where it runs.
            config_file: where the config came from, to be followed; None for options.
            api: the API server; None: the one that this Pod, or this user, belongs to.
            timing: all times.
        """
        self.restarts: Counter[str] = Counter()
        """Restarts of each part after a failure."""
        timing = timing or AgentTiming()
        self.common = common = Common(
            host,
            Poller(config_file, SPEC, effective, timing.config),
            effective.config,
            api or Api(after=self._kubelet_first),
            timing,
        )
        record = recover(Ledger(), read_record(common.directory), time.monotonic())
        self._invocation = Invocation(
            pod=host.pod, config_file=str(config_file or ""), host_root=str(host.root)
        )
        self._started_at = time.monotonic()
        self.hardware = parts.hardware(common, record.cards, self.restarts)
        self.inventory = self.hardware.inventory
        self.node = parts.node(common)
        self.allocator = parts.allocation(common, Feed(record), self.inventory, self.node)
        self.kubelet = parts.kubelet(common, self.allocator)
        self.cluster = parts.cluster(
            common, self.inventory, self.node, self.allocator, self.kubelet, self.state
        )
        self.web = parts.web(
            common, self.hardware, self.allocator, self.kubelet, self.cluster, self.state
        )

    async def _kubelet_first(self) -> None:
        """Waits until the kubelet has our devices, or needs the API server for them; a second."""
        driver = self.kubelet.driver.status
        sessions = [session.status for session in self.kubelet.sessions]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KUBELET_FIRST):
                async for _ in changes_of(driver, *sessions):
                    if any(status.value.phase is SessionPhase.REGISTERED for status in sessions):
                        return
                    if driver.value.phase is not SessionPhase.NO_CARDS:
                        return

    def state(self) -> AgentState:
        """Returns the state, for conditions, pages and metrics."""
        common = self.common
        config = common.configs.value
        inventory = self.inventory
        node = self.node
        web = self.web
        allocator = self.allocator
        cordons = allocator.cordons.state.value
        labeller = self.cluster.labeller
        events = self.cluster.events
        holdings = allocator.pod_resources.holdings.value
        wishes = allocator.wishes.value
        snapshot = inventory.snapshots.value
        cordoned = allocator.cordons.cards.value
        own = node.watch.state.value

        return AgentState(
            version=__version__,
            node=common.host.node_name,
            hostname=common.host.hostname,
            invocation=self._invocation,
            started_at=self._started_at,
            now=time.time(),
            monotonic=time.monotonic(),
            snapshot=snapshot,
            usages=allocator.usages.value,
            assignments=holdings.assignments,
            assignments_error=holdings.error,
            resources=self._resources(),
            # Each resource has a stream of its own and loses it when the kubelet restarts.
            kubelet_restarts=max(
                (session.counts.returns for session in self.kubelet.sessions), default=0
            ),
            dra=self._dra(),
            wanted=tuple(resource.of_families(wishes.families) for resource in wishes.resources),
            auto_pending_reason=node.dra_support.state.value.waits,
            cordons=cordoned,
            held_by=plan.holders(
                allocator.facts(),
                (card for card in snapshot.cards if card.id in cordoned),
            ),
            expected_cards=config.health.expected_cards,
            recorded=inventory.recorded,
            first_ids=cordons.first_ids,
            cordons_lost=cordons.lost,
            cordons_wrong=cordons.wrong,
            api_error=common.api.silent,
            node_error=node.watch.error,
            reads=common.api.reads,
            disabled=wishes.disabled,
            config=common.poller.states.value,
            stale_after=stale_after(self.hardware.readers.interval(config.metrics.interval)),
            labels=labeller.state.value if labeller else None,
            condition=self.cluster.condition.state.value,
            trends=inventory.trends.value,
            evictions=self.cluster.evictor.state.value,
            maintenance=own.maintenance if own else "",
            timeline=web.timeline_writer.timeline,
            restarts=self.restarts,
            lag=web.lag.seconds,
            labels_applied=labeller.results if labeller else {},
            events=events.results,
            reading_failures=inventory.failures,
            page_failures=web.exposition.failures,
            kernel_error=self.hardware.kernel.news.value.trouble,
            cdi_error=allocator.specs.error,
            tls=web.certificates.state.value if web.certificates else None,
            authorizations=web.authorizer.results if web.authorizer else {},
            refused={
                ("metrics", "open"): web.server.made_room,
                ("probes", "open"): web.probes.made_room,
            },
        )

    def _resources(self) -> tuple[ResourceState, ...]:
        """Returns the resources that the device plugin serves, or is to serve."""
        wishes = self.allocator.wishes.value
        devices = {
            resource.name: feed.value
            for resource in wishes.resources
            if (feed := self.allocator.devices[resource.name]).value
            or resource.of_families(wishes.families).widths
        }
        return tuple(
            ResourceState(session=status, counts=session.counts, devices=devices[status.resource])
            for session in self.kubelet.sessions
            if (status := session.status.value).resource in devices
        )

    def _dra(self) -> tuple[DraState, ...]:
        driver = self.kubelet.driver
        if not driver.needed:
            return ()
        return (
            DraState(
                session=driver.status.value,
                counts=driver.counts,
                slices=driver.slices.state.value,
                devices=driver.pool.offered.value or (),
                claims=driver.prepared(),
            ),
        )
