"""`npu-agent cdi generate`: the CDI spec of a host without a kubelet."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_agent import files
from npu_agent.cli import CommandError, host_root
from npu_agent.core.grant import Grant, grant
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.offer import Device, cut
from npu_agent.inventory.card import ProbeSettings
from npu_agent.kubelet.cdi import NAME, grants_spec, spec_file
from npu_agent.people.cards import read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import quiet, vendors
from npu_agent.vendors import CDI_KINDS, REGISTRY

_DIRECTORY = "etc/cdi"
"""Below the host's root: for the specs of the host, which outlive a reboot."""
_ALL = "all"
"""The name of all cards together."""


def main(args: argparse.Namespace) -> int:
    config = quiet(args)
    settings = ProbeSettings(host_nodes=config.containers.device_nodes, root=str(host_root(args)))
    asyncio.run(_generate(args, settings))
    return 0


async def _generate(args: argparse.Namespace, settings: ProbeSettings) -> None:
    snapshot = await read_once(vendors(args), settings=settings)
    specs = host_specs(snapshot)
    for note in view.remarks(snapshot):
        print(f"npu-agent: {note}", file=sys.stderr)
    for reason in specs.left_out:
        print(f"npu-agent: left out: {reason}", file=sys.stderr)
    if args.stdout:
        for content in filter(None, specs.files.values()):
            print(json.dumps(json.loads(content), indent=2))
    else:
        await _put(host_root(args) / _DIRECTORY, specs)
    if not specs.names:
        remedy = "`npu-agent doctor` says what is missing"
        raise CommandError(f"no NPU to offer below {host_root(args)}: {remedy}")


async def _put(directory: Path, specs: HostSpecs) -> None:
    for name, content in specs.files.items():
        path = directory / name
        try:
            changed = await files.replace(path, content, durable=True)
        except OSError as error:
            # The second name is that of the spec: the first one is of the file next to it.
            raise CommandError(
                f"{error.filename2 or directory}: {error.strerror or error}: run it as root, "
                "with a directory there that can be written, or print the specs by --stdout"
            ) from error
        if content is not None:
            print(f"{path} written")
        elif changed:
            print(f"{path} removed: there is no NPU to offer")
    for device in specs.names:
        print(device)


@dataclass(frozen=True, slots=True)
class HostSpecs:
    """The CDI specs of a host without a kubelet."""

    files: Mapping[str, bytes | None]
    """By their names in /etc/cdi, one for each kind; None: there is to be no such file."""
    names: tuple[str, ...]
    """As a runtime is asked for them: ``example.com/npu=npu0``."""
    left_out: tuple[str, ...]
    """What is not offered, with the reason: ``npu1: unhealthy: ...``."""


def host_specs(snapshot: Snapshot) -> HostSpecs:
    """The specs for people who name cards by hand, as in ``docker run --device``.

    A card is named by its ID (mostly its UUID) and ``npu0``, its parts ``npu0:0-3``, and all
    healthy cards of a vendor together ``all``; each has nodes and environment. Allocations
    are not tracked: two containers can be given the same card. Unhealthy cards are left out: a
    runtime then says that it does not know the device, and the container is not started.
    """
    grants: dict[str, dict[str, Grant]] = {kind: {} for kind in CDI_KINDS}
    whole: dict[str, list[Device]] = {kind: [] for kind in CDI_KINDS}
    left_out: list[str] = []
    numbers = Counter(state.card.name for state in snapshot.cards)
    for state in snapshot.cards:
        card = state.card
        (device,) = cut(state, card.core_count)
        if not device.healthy:
            left_out.append(f"{card.name}: unhealthy: {device.reason}")
            continue
        if shared := numbers[card.name] > 1:
            left_out.append(f"the name {card.name}: several cards have it; use {state.id}")
        kind = card.access.cdi_kind
        whole[kind].append(device)
        for name, part in _named_devices(state, device, by_number=not shared):
            if part.nodes and NAME.fullmatch(name):
                grants[kind][name] = grant([part])
    for kind, devices in whole.items():
        if devices:
            grants[kind][_ALL] = grant(devices)
    specs = {
        spec_file(kind): grants_spec(kind, granted) if granted else None
        for kind, granted in grants.items()
    }
    offered = (f"{kind}={name}" for kind, granted in grants.items() for name in granted)
    left_out += (f"{node}: no device node on this host" for node in snapshot.missing_nodes)
    return HostSpecs(specs, tuple(offered), tuple(left_out))


def _named_devices(
    state: CardState, whole: Device, *, by_number: bool
) -> Iterator[tuple[str, Device]]:
    yield state.id, whole
    if not by_number:
        return
    yield whole.name, whole
    for width in sorted(set(REGISTRY.families[state.card.family]), reverse=True):
        for part in cut(state, width):
            if part.healthy:
                yield f"{state.card.name}:{part.cores}", part
