"""`npu-agent cordon` and `uncordon`: one card out of service and back, by the annotation."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from npu_agent.backoff import Backoff
from npu_agent.cli import WRONG, CommandError, program
from npu_agent.cli.common import quiet, vendors
from npu_agent.core.cordon import ANNOTATION, entries
from npu_agent.kube import Api, ApiError, ErrorKind, ThisNode
from npu_agent.kube.credentials import in_pod
from npu_agent.kube.errors import NOT_RBAC
from npu_agent.kube.request import Request
from npu_agent.kubelet.cordons import last_cordons
from npu_agent.outputs.web.report import Report, ReportedCard
from npu_agent.people.cards import read_once
from npu_agent.people.cluster.agents import report_of
from npu_agent.people.cluster.fetch import fetch
from npu_agent.people.cluster.proxy import through_kubectl
from npu_agent.people.cluster.view import devices
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.text import one_line, shown
from npu_agent.vendors import DRIVERS

_RIGHTS = (
    "your user lacks that right: `kubectl apply -f k8s/examples/npu-service.yaml`, "
    "then `kubectl create clusterrolebinding npu-service --clusterrole=npu-service --user=NAME`"
)
"""For a person, where the client's own remedy is for the agent."""
_TRIES = 20
"""To change the annotation while others change the Node."""


def main(args: argparse.Namespace) -> int:
    """Cordons the card, or uncordons it."""
    quiet(args)
    return run_until_signal(_change(args))


def node_of(args: argparse.Namespace) -> str:
    """The Node's name: --node, or that of the Pod."""
    name: str | None = args.node or os.environ.get("NODE_NAME")
    if not name:
        raise CommandError("name the Node: --node NAME, as in `kubectl get nodes`", WRONG)
    return name


@asynccontextmanager
async def api_server(args: argparse.Namespace) -> AsyncIterator[Api]:
    """The API server: for the Node of this Pod as its account, else through a person's kubectl.

    What it refuses is a CommandError with the remedy for a person.
    """
    try:
        if not args.node and in_pod():
            async with Api() as api:
                yield api
        else:
            async with through_kubectl(args.kubectl or ()) as (api, place):
                print(f"{program()}: {place}", file=sys.stderr)
                yield api
    except ApiError as error:
        lacks = error.kind is ErrorKind.FORBIDDEN and error.remedy != NOT_RBAC
        raise CommandError(f"{error.what}: {_RIGHTS}" if lacks else str(error)) from error


def card_of(npu: str, cards: Iterable[ReportedCard]) -> ReportedCard:
    """The card that a person means by its name, UUID, PCI address or ID.

    Raises:
        CommandError: none, or several.
    """
    cards = list(cards)
    matches = [card for card in cards if npu.lower() in _names(card)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = one_line(", ".join(card.id for card in matches))
        raise CommandError(f"{npu} is the name of several cards: take one of {ids}", WRONG)
    here = one_line(", ".join(card.name for card in cards)) or "none"
    raise CommandError(f"{shown(npu)}: no such card here; there are {here}", WRONG)


async def known_ids(api: Api, name: str) -> set[str]:
    """The IDs of cards that the API server's own objects have for a Node, in lower case."""
    cluster = await fetch(api, "slices", node=name)
    return {
        str(published.device.attribute("uuid")).lower()
        for published in devices(cluster)
        if published.driver in DRIVERS and published.pool == name
    }


@dataclass(frozen=True, slots=True)
class Target:
    """A card, and how the annotation can name it."""

    npu: str
    """What the person calls it: the name that it has now, or another of its names."""
    card: ReportedCard
    """As its agent has it."""
    first_ids: Mapping[str, str] = field(default_factory=dict)
    """The agent's: a name in the annotation may be that of another card by now."""
    known: Collection[str] = ()
    """IDs that the API server's own objects have, in lower case."""

    def is_meant(self, key: str) -> bool:
        """Whether a key of the annotation is for this card."""
        first = self.first_ids.get(key.lower())
        if first is not None:
            return first.lower() == self.card.id.lower()
        return key.lower() in _names(self.card)

    def key(self, keys: Iterable[str]) -> str:
        """What to write into an annotation with these: what the person calls it, or its ID.

        The page of an agent alone does not say which card is taken out of service. So the ID is
        taken only if it is known, or if what the person calls it is a key for another card.
        """
        lower = {*self.known, *map(str.lower, keys)}
        by_id = self.card.id.lower() in lower or not self.is_meant(self.npu)
        return self.card.id if by_id else self.npu


async def set_cordon(api: Api, name: str, target: Target, reason: str | None) -> None:
    """Cordons a card of the Node `name` for a reason, or uncordons it (None); others stay.

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
        cordons = json.loads((before or "").strip() or "{}")
        after = {key: why for key, why in cordons.items() if not target.is_meant(key)}
        if reason is not None:
            after[target.key(cordons)] = reason
        elif after == cordons:
            other = target.first_ids.get(target.npu.lower(), target.card.id)
            of = f": the cordon {target.npu} is of {other}" if other != target.card.id else ""
            raise CommandError(f"{target.npu} of Node {name} is not cordoned{of}")
        return json.dumps(after) if after else None

    await change_annotation(api, name, ANNOTATION, change)


async def change_annotation(
    api: Api, name: str, key: str, change: Callable[[str | None], str | None]
) -> None:
    """Changes an annotation of a Node: what others write meanwhile is never lost.

    Args:
        api: the API server.
        name: the Node's.
        key: the annotation's.
        change: the text that is there (None: none) to the one that should be.

    Raises:
        ApiError: of any kind; CONFLICT where others write without end.
    """
    pause = Backoff(longest=1.0)
    get = Request("get", "Node", ThisNode, name=name, metadata_only=True)
    while True:
        meta = (await api.ask(get)).metadata
        before = meta.annotations.get(key)
        if (after := change(before)) == before:
            return
        written = {"resourceVersion": meta.resource_version, "annotations": {key: after}}
        try:
            await api.ask(replace(get, verb="patch", body={"metadata": written}))
        except ApiError as error:
            if error.kind is not ErrorKind.CONFLICT or pause.tries >= _TRIES:
                raise
            await asyncio.sleep(pause.next())
        else:
            return


def _names(card: ReportedCard) -> set[str]:
    names = (card.id, card.name, card.uuid, card.pci_bus_id)
    return {name.lower() for name in names if name}


async def _change(args: argparse.Namespace) -> None:
    name = node_of(args)
    async with api_server(args) as api:
        report = await report_of(api, name) if args.node else await _here(args)
        first_ids = report.first_ids
        try:
            card = card_of(args.npu, report.cards)
        except CommandError:
            if args.command == "cordon":
                raise
            # One that is gone may still be cordoned.
            card = ReportedCard(args.npu, 0, first_ids.get(args.npu.lower(), args.npu))
        if args.command == "uncordon":
            await set_cordon(api, name, Target(args.npu, card, first_ids), None)
        else:
            ids = await known_ids(api, name) if args.node else {card.id.lower()}
            await set_cordon(api, name, Target(args.npu, card, first_ids, ids), args.reason)
    print(f"{args.npu} of Node {name} is {args.command}ed")


async def _here(args: argparse.Namespace) -> Report:
    snapshot = await read_once(vendors(args))
    cards = tuple(
        ReportedCard(card.name, card.core_count, state.id, card.uuid, card.pci_bus_id)
        for state, card in ((state, state.card) for state in snapshot.cards)
    )
    last = last_cordons(Path(quiet(args).plugin_dir), snapshot)
    return Report(cards, first_ids=dict(last.first_ids))
