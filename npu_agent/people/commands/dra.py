"""`npu-agent dra slices`: the ResourceSlices of a node that is still to be made."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import yaml

from npu_agent import config
from npu_agent.cli import WRONG, CommandError
from npu_agent.config.resources import offered_by
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.offer import names
from npu_agent.core.pool import pool
from npu_agent.outputs.dra.slices import slices
from npu_agent.people.commands.common import quiet
from npu_agent.people.simulator.cards import CardSpec, parse_cards
from npu_agent.vendors import DRA

_NODE = "template"
"""The name of Node and pool; `spec.nodeName` must not be empty."""


def main(args: argparse.Namespace) -> int:
    """Prints the slices as YAML; fails if the config leaves some of the cards to another API."""
    settings = quiet(args, tolerant=False)
    try:
        cards = parse_cards(args.template, option="--template")
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error
    manifests = [*_template(cards, settings)]
    print(f"# Left out, because only a host has them: {', '.join(DRA.of_host)}.")
    print("# Node, pool and devices have other names there.")
    print(yaml.safe_dump_all(manifests, sort_keys=False, width=1000), end="")
    return 0


def _template(cards: Collection[CardSpec], settings: config.Config) -> Iterator[dict[str, Any]]:
    """Yields the slices, as with `allocation.api: dra`: that key may differ by node.

    Raises:
        CommandError: `resources` leaves a family to the device plugin.
    """
    by_dra = replace(settings, allocation=replace(settings.allocation, api="dra"))
    families = {card.family for card in cards}
    offered = offered_by(by_dra, families, "dra", None, auto=True)
    if left := sorted(families - offered):
        raise CommandError(f"resources: the api of {left[0]} is device-plugin: set it to dra")
    disabled = config.disabled_for(settings, None)
    healthy = Health(state=HealthState.HEALTHY, reason="", since=0.0)
    states = (
        CardState(id=card.name, card=DRA.blank(card.family, card.index), health=healthy)
        for card in cards
    )
    devices = pool(
        Snapshot(tuple(card for card in states if names(card).isdisjoint(disabled)), complete=True),
        dra=DRA,
        families=offered,
        by_index=True,
        partitions=settings.dra.partitions,
    )
    for manifest in slices(devices, driver=DRA.driver, node=_NODE, uid="", generation=1):
        del manifest["metadata"]["ownerReferences"]
        yield manifest
