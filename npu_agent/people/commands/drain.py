"""`npu-agent drain`: cordons a card, evicts the Pods that hold it, and waits until it is free.

With the rights of the person who asks, and not the agent's. What the agent's page says is
held against the Pods' own objects before anything happens to them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection

from npu_agent.cli import CommandError
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.eviction import evict
from npu_agent.people.cluster import rows
from npu_agent.people.cluster.fetch import AgentReports, fetch, report_of
from npu_agent.people.cluster.objects import Pod
from npu_agent.people.commands.common import quiet
from npu_agent.people.commands.cordon import (
    api_server,
    card_of,
    node_of,
    set_cordon,
)
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.people.report import Report, ReportedCard
from npu_agent.text import one_line
from npu_agent.vendors import DRA

_EVERY = 1.0
"""Seconds between two questions to the agent."""
_WORDS = rows.Words(driver=DRA.driver, domain=DRA.driver.partition(".")[2], cores={})


def main(args: argparse.Namespace) -> int:
    """Runs the command; fails if a Pod cannot be evicted within --timeout."""
    quiet(args)
    return run_until_signal(_drain(args))


async def _drain(args: argparse.Namespace) -> None:
    name = node_of(args)
    async with api_server(args) as api:
        report = await report_of(api, name)
        card = card_of(args.npu, report.cards)
        holding, unclear = await _holders(api, name, card, report)
        if args.dry_run:
            lines = [
                f"{pod.key} stays: it is {pod.stays}" if pod.stays else f"would evict {pod.key}"
                for pod in holding
            ]
            print("\n".join([*lines, *unclear] or ["would evict no Pod"]))
            return
        for reason in unclear:
            print(reason, flush=True)
        await set_cordon(api, name, card, report.first_ids, args.reason)
        print(f"{args.npu} of Node {name} is cordoned: {args.reason}", flush=True)
        await _empty(api, name, card.id, args, {*unclear})
    again = f"npu-agent uncordon {args.npu} --node {name}"
    if args.kubectl is not None:
        again = f"kubectl npu uncordon {name} {args.npu}"
    print(f"{args.npu} is free and can be reset; then `{again}`")


async def _holders(
    api: Api, node: str, card: ReportedCard, report: Report, evicted: Collection[str] = ()
) -> tuple[list[Pod], list[str]]:
    """The Pods that hold a card, and why more may hold it.

    A Pod does by its own objects: on this Node, with a request for NPUs or a claim. Of Pods that
    were `evicted` the objects may be gone before their containers are.
    """
    cluster = await fetch(api, "pods", "claims", "slices", node=node)
    if {"Pod", "ResourceClaim"} & cluster.refused.keys() or cluster.unread:
        missing = "; ".join([*cluster.refused.values(), *cluster.unread])
        raise CommandError(f"{missing}: who holds it is not known")
    holding: list[Pod] = []
    unclear: list[str] = []
    holdings = rows.holdings(cluster, _WORDS, AgentReports({node: report}))
    named = {(holder.namespace, holder.pod, f"claim/{holder.claim}") for holder in card.holders}
    for pod in cluster.pods:
        of_pod = [row for row in holdings if f"{row.namespace}/{row.pod}" == pod.key]
        # Of a device that has left the slices the objects say no more than that the Pod has it.
        if any(
            _is(card, row) or (row.cores is None and (row.namespace, row.pod, row.of) in named)
            for row in of_pod
        ):
            holding.append(pod)
        elif any(row.cores is None and (not card.uuid or "?" in str(row.card)) for row in of_pod):
            unclear.append(f"{pod.key} has NPUs, and no agent says which")
    keys = {pod.key for pod in holding}
    for holder in card.holders:
        key = one_line(f"{holder.namespace}/{holder.pod}")
        if key in keys:
            continue
        what = f"the agent names {key}, which no object shows as a Pod of Node {node} with NPUs"
        unclear.append(f"{key} is ending" if key in evicted else what)
    return holding, unclear


def _is(card: ReportedCard, row: rows.Holding) -> bool:
    """Whether a Pod has this card; the kubelet's word (KEP-4680) is an ID of the device."""
    if row.cores is None:
        return bool(card.uuid) and str(card.uuid).lower() in str(row.card).lower()
    return row.card == card.name and row.family in ("", card.family)


async def _empty(
    api: Api, node: str, card_id: str, args: argparse.Namespace, said: set[str]
) -> None:
    """Evicts the card's holders until agent and objects agree that it is free.

    What was `said` is not printed again.

    Raises:
        ApiError: of any kind.
        CommandError: it is not within --timeout, or cannot be.
    """
    until = time.monotonic() + args.timeout
    evicted: dict[str, str] = {}  # the names of Pods by UID
    while True:
        try:
            report = await report_of(api, node)
        except ApiError:  # another Pod may be the agent by now
            report = await report_of(api, node)
        card = next((card for card in report.cards if card.id == card_id), None)
        if card is None:
            raise CommandError(f"{args.npu} has left Node {node}, and is still cordoned")
        holding, waits = await _holders(api, node, card, report, evicted.values())
        pause = _EVERY
        if card.cordoned is None:
            waits = ["the agent has not seen the cordon: set `cordon: true` in its config"]
        elif holding:
            for pod in holding:
                reason, seconds = await _evict(api, pod, args.grace_period, evicted)
                waits.append(reason)
                pause = max(pause, seconds)
        elif not waits and card.held_by is not None:
            waits = [one_line(card.held_by)]
        if not waits:
            return
        for reason in waits:
            if reason not in said:
                said.add(reason)
                print(reason, flush=True)
        if time.monotonic() > until:
            left = "; ".join(waits)
            raise CommandError(f"not free within {args.timeout:g} s, and still cordoned: {left}")
        await asyncio.sleep(min(pause, until - time.monotonic()))


async def _evict(
    api: Api, pod: Pod, grace_period: int | None, evicted: dict[str, str]
) -> tuple[str, float]:
    """Asks for the eviction of this very Pod, and adds it to the `evicted` once that is granted.

    Returns:
        What the Pod waits for, and the seconds that the API server asks to wait.
    """
    ending = f"{pod.key} is ending", 0.0
    if pod.metadata.deletion_timestamp or pod.uid in evicted:
        return ending
    if pod.stays:
        raise CommandError(
            f"{pod.key} is {pod.stays}, which an eviction would bring back: it was not "
            "evicted, and the card stays cordoned; delete its owner, or keep it off this Node"
        )
    try:
        await evict(api, pod, grace_period=grace_period)
    except ApiError as error:
        if error.kind is ErrorKind.TOO_MANY:
            return _delay(pod, error), error.retry_after or 0.0
        # Gone, or another Pod has its name by now.
        if error.kind not in (ErrorKind.NOT_FOUND, ErrorKind.CONFLICT):
            raise
    evicted[pod.uid] = pod.key
    print(f"evicted {pod.key}", flush=True)
    return ending


def _delay(pod: Pod, error: ApiError) -> str:
    if (budget := error.causes.get("DisruptionBudget")) is None:
        return f"{pod.key} is not evicted: {error.what}"
    look = f"`kubectl get pdb -n {pod.namespace}`"
    return f"{pod.key} is kept by its PodDisruptionBudget ({budget}): {look}"
