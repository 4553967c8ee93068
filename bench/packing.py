"""How well claims of several widths share the cards of a node: first fit in the order of the pool.

A pure simulation. The scheduler takes the first device that fits, in the order in which the agent
publishes them, and moves nothing that runs. Beside it stand the optimum, cards that can be packed
again at every arrival, and a node whose cards are cut for good, all to one width, which is then the
widest that anybody gets. ``python -m bench.packing`` prints this alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.figure import HEADER, Figure
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.pool import PoolDevice, pool
from npu_agent.vendors.furiosa.attributes import DRA
from npu_agent.vendors.furiosa.families import FAMILIES

CARDS, CORES = 8, 8
ARRIVALS, RUNS = 100, 100
WIDTHS = {1: 4, 2: 3, 4: 2, 8: 1}
"""How often claims of each width come."""


@dataclass(frozen=True)
class Arrival:
    """A claim: when it comes, how many cores it is for, and when it would end."""

    at: float
    cores: int
    until: float


def arrivals(seed: int) -> list[Arrival]:
    """Claims that together would take all cores of the node, on average."""
    chosen, at, found = random.Random(seed), 0.0, []
    mean = sum(n * often for n, often in WIDTHS.items()) / sum(WIDTHS.values())
    for _ in range(ARRIVALS):
        at += chosen.expovariate(1.0)
        (cores,) = chosen.choices(list(WIDTHS), list(WIDTHS.values()))
        found.append(Arrival(at, cores, at + chosen.expovariate(mean / (CARDS * CORES))))
    return found


def first_fit(claims: Sequence[Arrival], devices: Sequence[PoolDevice]) -> int:
    """The cores that were given to claims, each at its arrival or not at all."""
    held: list[tuple[float, int]] = []
    """When each device in use is free again, and its place in `devices`."""
    taken: set[tuple[str, int]] = set()
    places = {
        n: [at for at, one in enumerate(devices) if len(one.device.cores) == n] for n in WIDTHS
    }
    cores = [{(one.device.card_id, core) for core in one.device.cores} for one in devices]
    given = 0
    for claim in claims:
        while held and held[0][0] <= claim.at:
            taken -= cores[heapq.heappop(held)[1]]
        free = next((at for at in places[claim.cores] if taken.isdisjoint(cores[at])), None)
        if free is not None:
            taken |= cores[free]
            heapq.heappush(held, (claim.until, free))
            given += claim.cores
    return given


def counted(claims: Sequence[Arrival], width: int | None = None) -> int:
    """As `first_fit`, where cards are packed again each time; or where all are cut to one width."""
    held: list[tuple[float, int]] = []
    free, given = CARDS * CORES, 0
    for claim in claims:
        while held and held[0][0] <= claim.at:
            free += heapq.heappop(held)[1]
        takes = width or claim.cores
        if claim.cores <= takes <= free:
            free -= takes
            heapq.heappush(held, (claim.until, takes))
            given += claim.cores
    return given


def published() -> tuple[PoolDevice, ...]:
    """What the agent offers of so many RNGD, in its order."""
    healthy = Health(state=HealthState.HEALTHY, reason="works", since=0.0)
    family = FAMILIES["rngd"]
    cards = tuple(
        CardState(
            id=f"card-{at}",
            card=family.card(at, product="rngd", nodes=frozenset(family.nodes(at))),
            health=healthy,
        )
        for at in range(CARDS)
    )
    return pool(Snapshot(cards, complete=True), dra=DRA, families={"rngd"}, partitions=True)


def packing() -> Iterator[Figure]:
    """Of the cores that claims ask for when they come, how many they are given."""
    devices = published()
    runs = [arrivals(seed) for seed in range(RUNS)]
    asked = sum(claim.cores for claims in runs for claim in claims)

    def share(cores: int) -> str:
        return f"{100 * cores / asked:.1f} %"

    best = sum(map(counted, runs))
    static = {n: sum(counted(claims, n) for claims in runs) for n in WIDTHS}
    cut = sum(first_fit(claims, devices) for claims in runs)
    yield Figure("packing: cores given, cut on demand", share(cut))
    yield Figure("packing: all packed again at each arrival", share(best))
    fixed = " / ".join(share(given) for given in static.values())
    yield Figure("packing: all cut to 1 / 2 / 4 / 8 cores", fixed)


if __name__ == "__main__":
    print(HEADER, *packing(), sep="\n")
