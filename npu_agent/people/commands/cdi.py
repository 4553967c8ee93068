"""`npu-agent cdi generate`: the CDI spec of a host without a kubelet."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_agent import files
from npu_agent.cli import CommandError, host_root
from npu_agent.core.grant import Grant, grant
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.offer import Device, cut
from npu_agent.inventory.card import ProbeSettings
from npu_agent.kubelet.cdi import NAME, grants_spec, spec_file
from npu_agent.people.cards import at_one_moment, read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import probe_settings, quiet, vendor
from npu_agent.vendors import PROFILE, SPEC
from npu_agent.wording import ENGLISH

_DIRECTORY = "etc/cdi"
"""Below the host's root: for the specs of the host, which outlive a reboot."""
_ALL = "all"
"""The name of all cards together."""


def main(args: argparse.Namespace) -> int:
    config = quiet(args)
    asyncio.run(_generate(args, probe_settings(args, config)))
    return 0


async def _generate(args: argparse.Namespace, settings: ProbeSettings) -> None:
    snapshot = await read_once(vendor(args), settings=settings)
    spec = host_spec(snapshot)
    for note in view.notes(snapshot):
        print(f"npu-agent: {note}", file=sys.stderr)
    for reason in spec.left_out:
        print(f"npu-agent: left out: {reason}", file=sys.stderr)
    lasting = view.described(at_one_moment(snapshot, settings.policy))
    for state in snapshot.cards:
        if state.health.state is not HealthState.UNHEALTHY:
            for text in lasting.get(state.id, ()):
                print(f"npu-agent: {text}", file=sys.stderr)
    if args.stdout:
        if spec.content is not None:
            print(json.dumps(json.loads(spec.content), indent=2))
    else:
        await _put(host_root(args) / _DIRECTORY / spec_file(PROFILE.cdi_kind), spec)
        parts = [name for name in spec.devices if ":" in name]
        for name in spec.devices:
            if args.all or name not in parts:
                print(name)
        if parts and not args.all:
            print(f"and {len(parts)} parts of cards, which --all lists")
    if not spec.devices:
        remedy = "`npu-agent doctor` says what is missing"
        raise CommandError(f"no NPU to offer below {host_root(args)}: {remedy}")


async def _put(path: Path, spec: HostSpec) -> None:
    try:
        changed = await files.replace(path, spec.content, durable=True)
    except OSError as error:
        # The second name is that of the spec: the first one is of the file next to it.
        raise CommandError(
            f"{error.filename2 or path.parent}: {error.strerror or error}: run it as root, "
            "with a directory there that can be written, or print the spec by --stdout"
        ) from error
    if spec.content is not None:
        print(f"{path} written")
    elif changed:
        print(f"{path} removed: there is no NPU to offer")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The CDI spec of a host without a kubelet."""

    content: bytes | None
    """Of its file; None: there is to be no such file."""
    devices: tuple[str, ...]
    """As a runtime is asked for them: ``example.com/npu=npu0``."""
    left_out: tuple[str, ...]
    """What is not offered, with the reason: ``npu1: unhealthy: ...``."""


def host_spec(snapshot: Snapshot) -> HostSpec:
    """The spec for people who name cards by hand, as in ``docker run --device``.

    A card is named by its ID (mostly its UUID) and ``npu0``, its parts ``npu0:0-3``, and all
    healthy cards together ``all``; each has nodes and environment. Allocations
    are not tracked: two containers can be given the same card. Unhealthy cards are left out: a
    runtime then says that it does not know the device, and the container is not started.
    """
    grants: dict[str, Grant] = {}
    whole: list[Device] = []
    left_out: list[str] = []
    numbers = Counter(state.card.name for state in snapshot.cards)
    for state in snapshot.cards:
        card = state.card
        (device,) = cut(state, card.core_count)
        if not device.healthy:
            left_out.append(f"{card.name}: unhealthy: {ENGLISH.reason(state.health)}")
            continue
        if shared := numbers[card.name] > 1:
            left_out.append(f"the name {card.name}: several cards have it; use {state.id}")
        whole.append(device)
        for name, part in _named_devices(state, device, by_number=not shared):
            if part.nodes and NAME.fullmatch(name):
                grants[name] = grant([part])
    if whole:
        grants[_ALL] = grant(whole)
    left_out += (f"{node}: no device node on this host" for node in snapshot.missing_nodes)
    kind = PROFILE.cdi_kind
    return HostSpec(
        content=grants_spec(kind, grants) if grants else None,
        devices=tuple(f"{kind}={name}" for name in grants),
        left_out=tuple(left_out),
    )


def _named_devices(
    state: CardState, whole: Device, *, by_number: bool
) -> Iterator[tuple[str, Device]]:
    yield state.id, whole
    if not by_number:
        return
    yield whole.name, whole
    for width in sorted(set(SPEC.families[state.card.family]), reverse=True):
        for part in cut(state, width):
            if part.healthy:
                yield f"{state.card.name}:{part.cores}", part
