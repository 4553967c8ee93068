"""`npu-agent cordon` and `uncordon`: one card out of service and back, by the annotation."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.cli import WRONG, CommandError, program
from npu_agent.core.cordon import ANNOTATION, entries
from npu_agent.kube import Api, ApiError, ErrorKind, ThisNode
from npu_agent.kube.credentials import in_pod
from npu_agent.kube.errors import NOT_RBAC
from npu_agent.kube.request import Request
from npu_agent.kubelet.cordons import last_cordons
from npu_agent.people.cards import read_once
from npu_agent.people.cluster.fetch import report_of
from npu_agent.people.cluster.proxy import through_kubectl
from npu_agent.people.commands.common import quiet, vendor
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.people.report import Report, ReportedCard
from npu_agent.text import one_line, shown

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


async def set_cordon(
    api: Api, name: str, card: ReportedCard, first_ids: Mapping[str, str], reason: str | None
) -> None:
    """Cordons a card by its ID for a reason, or uncordons it (None); other cordons stay.

    Args:
        api: the API server.
        name: the Node's.
        card: as the Node's agent has it.
        first_ids: the agent's. A name in the annotation may be that of another card by now.
        reason: for people.

    Raises:
        ApiError: of any kind; CONFLICT where others change the Node without end.
        CommandError: the annotation cannot be read, or has no cordon of this card.
    """
    pause = Backoff(longest=1.0)
    get = Request("get", "Node", ThisNode, name=name, metadata_only=True)
    while True:
        meta = (await api.ask(get)).metadata
        cordons = _cordons(name, meta.annotations.get(ANNOTATION) or "")
        others = {key: why for key, why in cordons.items() if not _is_meant(key, card, first_ids)}
        if reason is None and others == cordons:
            raise CommandError(f"{card.name} of Node {name} is not cordoned")
        after = others if reason is None else {**others, card.id: reason}
        annotation = json.dumps(after) if after else None
        metadata = {
            "resourceVersion": meta.resource_version,
            "annotations": {ANNOTATION: annotation},
        }
        try:
            await api.ask(replace(get, verb="patch", body={"metadata": metadata}))
        except ApiError as error:
            if error.kind is not ErrorKind.CONFLICT or pause.tries >= _TRIES:
                raise
            await asyncio.sleep(pause.next())
        else:
            return


def _cordons(node: str, annotation: str) -> dict[str, Any]:
    """The annotation as it is: reasons of any type stay."""
    try:
        entries(annotation)
    except ValueError as error:
        raise CommandError(
            f"the annotation {ANNOTATION} of Node {node} cannot be read ({error}): correct it, "
            f"or remove it by `kubectl annotate node {node} {ANNOTATION}-`"
        ) from error
    cordons: dict[str, Any] = json.loads(annotation.strip() or "{}")
    return cordons


def _is_meant(key: str, card: ReportedCard, first_ids: Mapping[str, str]) -> bool:
    """Whether a key of the annotation is for this card."""
    first = first_ids.get(key.lower())
    return key.lower() in _names(card) if first is None else first.lower() == card.id.lower()


def _names(card: ReportedCard) -> set[str]:
    names = (card.id, card.name, card.uuid, card.pci_bus_id)
    return {name.lower() for name in names if name}


async def _change(args: argparse.Namespace) -> None:
    name = node_of(args)
    async with api_server(args) as api:
        report = await report_of(api, name) if args.node else await _here(args)
        try:
            card = card_of(args.npu, report.cards)
        except CommandError:
            if args.command == "cordon":
                raise
            # One that is gone may still be cordoned.
            card = ReportedCard(args.npu, 0, report.first_ids.get(args.npu.lower(), args.npu))
        reason = args.reason if args.command == "cordon" else None
        await set_cordon(api, name, card, report.first_ids, reason)
    print(f"{args.npu} of Node {name} is {args.command}ed")


async def _here(args: argparse.Namespace) -> Report:
    snapshot = await read_once(vendor(args))
    cards = tuple(
        ReportedCard(card.name, card.core_count, state.id, card.uuid, card.pci_bus_id)
        for state, card in ((state, state.card) for state in snapshot.cards)
    )
    last = last_cordons(Path(quiet(args).plugin_dir), snapshot)
    return Report(cards, first_ids=dict(last.first_ids))
