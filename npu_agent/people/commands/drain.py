"""`npu-agent drain`: cordons a card, evicts the Pods that hold it, and waits until it is free.

With the rights of the person who asks: the agent has none to evict.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from npu_agent.cli import CommandError
from npu_agent.cli.common import quiet
from npu_agent.kube import Api, pods
from npu_agent.people.commands.cordon import (
    Known,
    api_server,
    card_of,
    cards_of,
    node_of,
    set_cordon,
)

_EVERY = 1.0
"""Seconds between two questions to the agent."""


def main(args: argparse.Namespace) -> int:
    """Runs the command; fails if a Pod cannot be evicted within --timeout."""
    quiet(args)
    asyncio.run(_drain(args))
    return 0


async def _drain(args: argparse.Namespace) -> None:
    name = node_of(args)
    async with api_server(args) as api:
        agent = pods.Agent(api, name)
        card = card_of(args.npu, await cards_of(agent))
        if args.dry_run:
            for pod in holders(card) or ["no Pod"]:
                print(f"would evict {pod}")
            return
        await set_cordon(api, name, card, args.reason)
        print(f"{card['name']} of Node {name} is cordoned: {args.reason}")
        await _empty(api, agent, card["id"], args)
    again = f"npu-agent uncordon {args.npu} --node {name}"
    if args.login:
        again = f"kubectl npu uncordon {name} {args.npu}"
    print(f"{card['name']} is free and can be reset; then `{again}`")


def holders(card: Known) -> list[str]:
    """The Pods that hold any of the card, by namespace and name."""
    return sorted({f"{one['namespace']}/{one['pod']}" for one in card["holders"]})


async def _empty(api: Api, agent: pods.Agent, card_id: str, args: argparse.Namespace) -> None:
    """Evicts the card's holders until the agent reports that it is free.

    Raises:
        ApiError: of any kind.
        CommandError: it is not within --timeout, or cannot be.
    """
    until, granted = time.monotonic() + args.timeout, set[str]()
    while True:
        card = card_of(card_id, await cards_of(agent))
        held = holders(card)
        if card["cordoned"] is None:
            waits = [
                "the agent has not seen the cordon: check that its config has not `cordon: false`"
            ]
        elif not held and card["held_by"] is None:
            return
        else:
            waits = [await _evict(api, pod, granted, args) for pod in held] or [card["held_by"]]
        if time.monotonic() > until:
            left = "; ".join(waits)
            raise CommandError(f"not free within {args.timeout:g} s, and still cordoned: {left}")
        await asyncio.sleep(_EVERY)


async def _evict(api: Api, holder: str, granted: set[str], args: argparse.Namespace) -> str:
    """Evicts a Pod, once; returns what it waits for now."""
    namespace, _, pod_name = holder.partition("/")
    pod = await pods.get(api, namespace, pod_name)
    if pod is None or pod.metadata.deletion_timestamp:
        return f"{holder} is ending"
    if pod.stays:
        raise CommandError(
            f"{holder} is {pod.stays}, which an eviction would bring back: it was not evicted, "
            "and the card stays cordoned; delete its owner, or keep it off this Node"
        )
    if pod.metadata.uid not in granted:
        if not await pods.evict(api, pod, args.grace_period):
            return f"{holder} is kept by its PodDisruptionBudget: `kubectl get pdb -n {namespace}`"
        granted.add(pod.metadata.uid)
        print(f"evicted {holder}", flush=True)
    return f"{holder} is ending"
