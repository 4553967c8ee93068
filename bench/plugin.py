"""The device plugin, as a kubelet sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc

from bench.figure import Figure, quantiles
from bench.process import DEADLINE, RESOURCE, running
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.people import simulator


def times(socket: Path, method: str, request: bytes, count: int = 1000) -> list[float]:
    """Seconds of each call to the agent, one after the other, from gRPC's C core."""
    channel: Any = grpc.insecure_channel(f"unix:{socket}")
    call = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
    taken = []
    for _ in range(count + 50):  # the first ones warm up
        began = time.perf_counter()
        call(request, timeout=DEADLINE)
        taken.append(time.perf_counter() - began)
    channel.close()
    return taken[50:]


def allocation(ids: list[str]) -> bytes:
    """A request for these devices."""
    container = wire.ContainerAllocateRequest(devices_ids=ids)
    return bytes(wire.AllocateRequest(container_requests=[container]))


def preference(ids: list[str]) -> bytes:
    """A request for half of these devices."""
    container = wire.ContainerPreferredAllocationRequest(
        available_device_i_ds=ids, allocation_size=len(ids) // 2
    )
    return bytes(wire.PreferredAllocationRequest(container_requests=[container]))


async def recoveries() -> AsyncIterator[Figure]:
    """How long each loss of the kubelet, and of a card, lasts."""
    async with running("warboy=8") as agent:
        kubelet, known = agent.kubelet, await agent.listed()

        began = time.perf_counter()
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "dead")
        await agent.until_healthy(7)
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("dead card to kubelet informed", taken, "<= 1.5 s")
        began = time.perf_counter()
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "ok")
        await agent.until_healthy(8)
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("recovered card to kubelet informed", taken)

        async def lose(what: str, target: str, loss: Awaitable[None]) -> Figure:
            nonlocal known
            await loss
            began = time.perf_counter()
            known = await agent.listed(after=known.endpoint)
            taken = f"{time.perf_counter() - began:.2f} s"
            return Figure(what, taken, target)

        async def restart() -> None:
            await kubelet.stop()
            await asyncio.sleep(1)
            await kubelet.start()

        async def cancel() -> None:
            kubelet.hang_up(RESOURCE)

        async def remove() -> None:
            await asyncio.to_thread((agent.plugins / known.endpoint).unlink)

        yield await lose("kubelet away 1 s: its return to registered", "<= 2 s", restart())
        await asyncio.sleep(6)  # a loss soon after another is met with more patience
        yield await lose("stream cancelled by the kubelet", "<= 2 s", cancel())
        await asyncio.sleep(6)
        yield await lose("our socket removed", "<= 2 s", remove())

        kept = (await agent.listed()).messages
        await kubelet.renew_socket()
        await asyncio.sleep(3)
        after = await agent.listed()
        nothing = after.endpoint == known.endpoint and after.messages == kept
        said = "nothing happens" if nothing else "registered again"
        yield Figure("kubelet.sock replaced, stream open", said, "nothing")


async def answers() -> AsyncIterator[Figure]:
    """How quick the calls are in which a Pod's start waits."""
    async with running("rngd=8", config="defaultPe: Single\n") as agent:
        await agent.settled()
        plugin = await agent.listed()
        ids, socket = list(plugin.healthy()), agent.plugins / plugin.endpoint
        for what, target, method, request in (
            ("the empty call", "", "GetDevicePluginOptions", b""),
            ("Allocate 1 of 64", "<= empty + 0.5 / 2 ms", "Allocate", allocation(ids[:1])),
            ("Allocate 8 of 64", "<= empty + 0.5 / 2 ms", "Allocate", allocation(ids[:8])),
        ):
            taken = await asyncio.to_thread(times, socket, method, request)
            yield Figure(f"{what}, p50 / p99", quantiles(taken), target)
    for cards, many, target in (("warboy=8", 16, "5 ms"), ("rngd=8", 64, "20 ms")):
        async with running(cards, config="defaultPe: Single\n") as agent:
            await agent.settled()
            plugin = await agent.listed()
            request = preference(list(plugin.healthy()))
            socket = agent.plugins / plugin.endpoint
            taken = await asyncio.to_thread(times, socket, "GetPreferredAllocation", request, 200)
            what = f"GetPreferredAllocation, {many // 2} of {many}, p50 / p99"
            yield Figure(what, quantiles(taken), f"<= {target}")
