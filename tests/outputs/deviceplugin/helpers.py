"""Cards and devices made in code, and sockets that are short enough for Linux."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_agent.config.resources import resources_of
from npu_agent.config.schema import Config, ResourceSpec
from npu_agent.core.grant import grant, requested
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.outputs.deviceplugin.service import container_response
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.families import FAMILIES


def resources(
    name: str, cores: int | None, overrides: tuple[tuple[str, str, int | None], ...] = ()
) -> tuple[Resource, ...]:
    """The resources of a config, also with another width for all families than defaultPe has."""
    specs = [ResourceSpec(name=n, family=f, cores_per_device=w or cores) for n, f, w in overrides]
    if cores and cores > 1:
        rest = SPEC.core_counts.keys() - {spec.family for spec in specs}
        specs += (ResourceSpec(name=name, family=f, cores_per_device=cores) for f in sorted(rest))
    config = Config(
        resource_name=name,
        default_pe="Single" if cores == 1 else "Fusion",
        resources=tuple(specs),
    )
    return resources_of(config, SPEC.core_counts)


def devnames(device: Device) -> tuple[str, ...]:
    return dict(device.environment)["NPU_DEVNAME"]


def selectors(device: Device) -> tuple[str, ...]:
    return dict(device.environment)["FURIOSA_DEVICES"]


def allocate(
    requests: Sequence[Sequence[str]], known: Mapping[str, Device], resource: str
) -> bytes:
    """An AllocateResponse for containers that ask for these device IDs."""
    containers = requested(requests, known, resource)
    return b"".join(container_response(grant(devices)) for devices in containers)


def state(
    family: str = "warboy",
    index: int = 0,
    *,
    id_: str | None = None,
    health: HealthState = HealthState.HEALTHY,
    reason: str = "works",
    missing: tuple[str, ...] = (),
    **card: Any,
) -> CardState:
    """A card with all its nodes but the `missing` ones (``pe0-1``, ``ch3``, or a full name)."""
    nodes = {
        node
        for node in FAMILIES[family].nodes(index)
        if not any(
            node in (gone, f"{FAMILIES[family].dev_dir}npu{index}{gone}")
            for gone in (*missing, *FAMILIES[family].access(index).optional_nodes)
        )
    }
    id_ = id_ or f"{family.upper()}-{index}"
    card.setdefault("uuid", id_)
    return CardState(
        id=id_,
        card=FAMILIES[family].card(index, product=family, nodes=frozenset(nodes), **card),
        health=Health(state=health, reason=reason, since=0.0),
    )


def snapshot(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


def devices(*cards: CardState, cores: int | None = None) -> tuple[Device, ...]:
    """All that one resource over all families offers of these cards."""
    (resource,) = resources("beta.furiosa.ai/npu", cores)
    return advertise(snapshot(*cards), resource)


def crowd(count: int) -> tuple[Device, ...]:
    """Many devices with long IDs: a list of 2,000 is more than a gRPC window holds."""
    (one,) = devices(state())
    return tuple(replace(one, id=f"{index:050}") for index in range(count))


@contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary directory with a short path: the one of pytest may be too long for a socket."""
    path = Path(tempfile.mkdtemp(prefix="npu-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
