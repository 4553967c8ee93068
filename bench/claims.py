"""DRA, as a kubelet and an API server see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from bench.apiserver import Node
from bench.figure import Figure, quantiles
from bench.process import DEADLINE, Agent, running
from npu_agent.core.pool import ClaimRef
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.people import simulator
from npu_agent.people.simulator.pluginmanager import Instance

ROUNDS = 300
WARM = 20
"""Rounds that are not counted."""


async def idle(seconds: float) -> AsyncIterator[Figure]:
    """What the API server is asked while nothing happens."""
    async with running("rngd=8", alive=True, dra=True) as agent:
        await agent.settled()
        await asyncio.sleep(2)
        requests, writes = len(agent.node.calls), len(agent.node.writes)
        await asyncio.sleep(seconds)
        asked, written = len(agent.node.calls) - requests, len(agent.node.writes) - writes
        yield Figure("while idle, DRA: requests; writes", f"{asked}; {written}", "; 0")


async def published() -> AsyncIterator[Figure]:
    """How soon the API server has what changed."""
    cards = 8
    async with running(f"rngd={cards}", dra=True) as agent:
        yield Figure("process start to slices", f"{agent.start:.2f} s")
        await agent.settled()
        (name,) = agent.node.slices
        taken = await _until_tainted(agent, "dead", 1)
        yield Figure("dead card to the taint in its slice", taken, "<= 1.5 s")
        taken = await _until_tainted(agent, "ok", 0)
        yield Figure("recovered card to the end of the taint", taken)
        began = time.perf_counter()
        agent.node.delete(name)
        await agent.node.until(lambda found: len(found) == cards, DEADLINE)
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("slice deleted to slice written again", taken, "<= 3 s")


async def _until_tainted(agent: Agent, fault: str, count: int) -> str:
    """How long it takes from a fault of npu0 until so many devices have a taint."""
    began = time.perf_counter()
    await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", fault)
    await agent.node.until(
        lambda found: sum(bool(one.get("taints")) for one in found.values()) == count, DEADLINE
    )
    return f"{time.perf_counter() - began:.2f} s"


async def answers() -> AsyncIterator[Figure]:
    """How quick the calls are in which a Pod with a claim waits."""
    async with running("rngd=8", dra=True) as agent:
        await agent.settled()
        for cards, count, limit in (("1 card", 1, 15), ("8 cards", 8, 30)):
            prepared, unprepared = await prepares(agent, count)
            yield Figure(f"Prepare {cards}, p50 / p99", quantiles(prepared), f"p99 <= {limit} ms")
        yield Figure(f"Unprepare {cards}, p50 / p99", quantiles(unprepared))


async def prepares(agent: Agent, cards: int) -> tuple[list[float], list[float]]:
    """As `rounds`, of claims for so many cards."""
    instance = await _registered(agent)
    devices = list(agent.node.devices())[:cards]
    claims = [_allocated(agent.node, instance, devices) for _ in range(ROUNDS)]
    return await asyncio.to_thread(rounds, instance, claims, cards)


async def _registered(agent: Agent) -> Instance:
    async with asyncio.timeout(DEADLINE):
        async for instances in agent.manager.instances.watch():
            if instances:
                return instances[-1]
    raise TimeoutError


def _allocated(node: Node, instance: Instance, devices: Sequence[str]) -> ClaimRef:
    return node.allocate(instance.driver, f"claim-{time.perf_counter_ns()}", devices, pod="pod")


def rounds(
    instance: Instance, claims: Sequence[ClaimRef], devices: int
) -> tuple[list[float], list[float]]:
    """Seconds to prepare each claim, and to unprepare it before the next, from gRPC's C core."""
    channel: Any = grpc.insecure_channel(f"unix:{instance.endpoint}")
    service = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
    prepare = channel.unary_unary(f"{service}/NodePrepareResources")
    unprepare = channel.unary_unary(f"{service}/NodeUnprepareResources")
    prepared, unprepared = [], []
    for ref in claims:
        # Both requests are the same bytes.
        claim = v1.Claim(namespace=ref.namespace, uid=ref.uid, name=ref.name)
        request = bytes(v1.NodePrepareResourcesRequest(claims=[claim]))
        began = time.perf_counter()
        answer = prepare(request, timeout=DEADLINE)
        between = time.perf_counter()
        end = unprepare(request, timeout=DEADLINE)
        unprepared.append(time.perf_counter() - between)
        prepared.append(between - began)
        given = v1.NodePrepareResourcesResponse().parse(answer).claims[ref.uid]
        assert len(given.devices) == devices, given.error
        ended = v1.NodeUnprepareResourcesResponse().parse(end).claims[ref.uid]
        assert not ended.error, ended.error
    channel.close()
    return prepared[WARM:], unprepared[WARM:]
