"""`npu-agent cordon` and `uncordon`: one card out of service and back, by the annotation."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from npu_agent.cli import WRONG, CommandError
from npu_agent.cli.common import quiet, vendors
from npu_agent.core.cordon import ANNOTATION, entries
from npu_agent.inventory.inventory import read_once
from npu_agent.kube import Api, ApiError, Kind, node
from npu_agent.kube.objects import AGENT
from npu_agent.kube.pods import Agent
from npu_agent.text import shown

Known = Mapping[str, Any]
"""A card as /status.json has it: ``id, name, uuid, pci_bus_id`` and more."""


_REMEDIES = {
    Kind.FORBIDDEN: "your user lacks that right: `kubectl apply -f k8s/examples/npu-service.yaml`, "
    "then `kubectl create clusterrolebinding npu-service --clusterrole=npu-service --user=NAME`",
    Kind.CREDENTIALS: "set KUBECONFIG to the file that your kubectl uses",
}
"""For a person, where the client's own remedies are for the agent."""


def main(args: argparse.Namespace) -> int:
    """Cordons the card, or uncordons it."""
    quiet(args)
    asyncio.run(_change(args))
    return 0


def node_of(args: argparse.Namespace) -> str:
    """The Node's name: --node, or that of the Pod."""
    name: str | None = args.node or os.environ.get("NODE_NAME")
    if not name:
        raise CommandError("name the Node: --node NAME, as in `kubectl get nodes`", WRONG)
    return name


@asynccontextmanager
async def api_server(args: argparse.Namespace) -> AsyncIterator[Api]:
    """The API server; what it refuses is a CommandError with the remedy for a person."""
    api = Api(args.login)
    try:
        yield api
    except ApiError as error:
        remedy = _REMEDIES.get(error.kind)
        raise CommandError(f"{error.what}: {remedy}" if remedy else str(error)) from error
    finally:
        await api.close()


def card_of(npu: str, cards: Iterable[Known]) -> Known:
    """The card that a person means by its name, UUID, PCI address or ID.

    Raises:
        CommandError: none, or several.
    """
    cards = list(cards)
    found = [card for card in cards if npu.lower() in _names(card)]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(card["id"] for card in found)
        raise CommandError(f"{npu} is the name of several cards: take one of {ids}", WRONG)
    here = ", ".join(card["name"] for card in cards) or "none"
    raise CommandError(f"{shown(npu)}: no such card here; there are {here}", WRONG)


async def set_cordon(api: Api, name: str, card: Known, reason: str | None) -> None:
    """Cordons a card of a Node for a reason, or uncordons it (None); others stay as they are.

    Raises:
        ApiError: of any kind.
        CommandError: the annotation that is there cannot be read.
    """

    def change(before: str | None) -> str | None:
        try:
            entries(before or "")
        except ValueError as error:
            raise CommandError(
                f"the annotation {ANNOTATION} of Node {name} cannot be read ({error}): correct it, "
                f"or remove it by `kubectl annotate node {name} {ANNOTATION}-`"
            ) from error
        found = json.loads((before or "").strip() or "{}")
        after = {key: each for key, each in found.items() if key.lower() not in _names(card)}
        if reason is not None:
            after[card["id"]] = reason
        elif after == found:
            raise CommandError(f"{card['name']} of Node {name} is not cordoned")
        return json.dumps(after) if after else None

    await node.change_annotation(api, name, ANNOTATION, change)


def _names(card: Known) -> set[str]:
    return {str(card[key]).lower() for key in ("id", "name", "uuid", "pci_bus_id") if card.get(key)}


async def _change(args: argparse.Namespace) -> None:
    name = node_of(args)
    async with api_server(args) as api:
        cards = await (cards_of(Agent(api, name)) if args.node else _here(args))
        try:
            card = card_of(args.npu, cards)
        except CommandError:
            if args.command == "cordon":
                raise
            card = {"id": args.npu, "name": args.npu}  # one that is gone may still be cordoned
        reason = args.reason if args.command == "cordon" else None
        await set_cordon(api, name, card, reason)
    print(f"{args.npu} of Node {name} is {args.command}ed")


async def cards_of(agent: Agent) -> list[Known]:
    """The cards of a Node, as its agent has them; raises as `status_of`."""
    cards: list[Known] = (await status_of(agent))["cards"]
    return cards


async def status_of(agent: Agent) -> dict[str, Any]:
    """/status.json of a Node's agent.

    Raises:
        ApiError: of any kind.
        CommandError: no agent runs there.
    """
    found = await agent.status()
    if found is None:
        raise CommandError(
            f"no agent runs on Node {agent.node}: `kubectl get pods -A -o wide -l {AGENT}`"
        )
    return found


async def _here(args: argparse.Namespace) -> list[Known]:
    snapshot = await read_once(vendors(args))
    return [{"id": state.id, **state.card.as_json()} for state in snapshot.cards]
