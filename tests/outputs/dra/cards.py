"""Pools of devices made in code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.plan import taints
from npu_agent.core.pool import PoolDevice, pool
from npu_agent.vendors.furiosa.attributes import DRA
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import snapshot, state

_BEGINNINGS = {"warboy": "E23A7C54", "rngd": "2E5EADE0"}


def pool_of(*cards: CardState, **options: Any) -> tuple[PoolDevice, ...]:
    """What DRA offers of these cards."""
    driver, held = DRA.driver, options.pop("held", lambda _: None)
    evict, degraded = options.pop("evict", False), options.pop("degraded", {})
    return tuple(
        replace(
            one,
            taints=taints(
                driver,
                one.device,
                evict=evict,
                held=held(one.device) is not None,
                trends=degraded.get(one.device.card_id, ()),
            ),
        )
        for one in pool(snapshot(*cards), **{"dra": DRA, "families": FAMILIES, **options})
    )


def card(family: str, index: int, **more: Any) -> CardState:
    """A card of which its driver says everything."""
    bus = 0x17 + index
    facts: dict[str, Any] = {
        "id_": f"{_BEGINNINGS[family]}-1200-4E50-8000-{index:012X}",
        "serial": f"SN{index:06}",
        "pci_bus_id": f"0000:{bus:02x}:00.0",
        "driver_version": "2025.4.0~dev2, 0e9e56a" if family == "rngd" else "1.9.2, 3def9c2",
        "firmware_version": "2025.4.0, 9a1f0c3" if family == "rngd" else "1.6.0, c1bebfd",
        "numa_node": index // 4,
        "switches": (
            f"pci0000:{bus - 1:02x}",
            f"0000:{bus - 1:02x}:01.0",
            f"0000:{bus - index % 2:02x}:00.0",
            f"0000:{bus:02x}:0{index % 2}.0",
        ),
    }
    return state(family, index, **(facts | more))


def rngd(count: int, unhealthy: tuple[int, ...] = (), **options: Any) -> tuple[PoolDevice, ...]:
    """The pool of so many RNGD cards, of which those with these numbers are unhealthy."""
    health = (
        HealthState.UNHEALTHY if at in unhealthy else HealthState.HEALTHY for at in range(count)
    )
    return pool_of(*(card("rngd", at, health=one) for at, one in enumerate(health)), **options)


def parts(count: int, unhealthy: tuple[int, ...] = ()) -> tuple[PoolDevice, ...]:
    """The same of cards that are cut on demand."""
    return rngd(count, unhealthy, partitions=True)
