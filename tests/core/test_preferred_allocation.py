"""Which devices are preferred, on topologies as the simulator (and real hosts) have them."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.offer import Device
from npu_agent.core.preferred_allocation import prefer
from npu_agent.people.simulator.cards import card
from tests.outputs.deviceplugin.helpers import devices, state


def host(family: str, count: int, cores: int | None = None) -> dict[str, Device]:
    """A host's devices by name. Cards: pairs behind a switch, pairs in turns on two NUMA nodes."""
    specs = [card(family, index) for index in range(count)]
    cards = [
        state(
            family,
            spec.index,
            id_=f"U{spec.index}",
            numa_node=spec.numa_node,
            switches=tuple(spec.pci_path.split("/")),
        )
        for spec in specs
    ]
    return {device.id: device for device in devices(*cards, cores=cores)}


EIGHT = host("warboy", 8)
"""U0 U1 | U4 U5 on NUMA node 0, U2 U3 | U6 U7 on node 1; ``|`` stands between switches."""
SINGLE = host("warboy", 8, cores=1)
CORES = host("rngd", 8, cores=1)


def chosen(
    size: int,
    available: list[str],
    must: list[str] | None = None,
    known: Mapping[str, Device] = EIGHT,
    degraded: tuple[str, ...] = (),
) -> tuple[list[str], str]:
    choice = prefer(available, must or [], size, known, degraded)
    return sorted(choice.ids), choice.reason


def but(*taken: str, known: Mapping[str, Device] = EIGHT) -> list[str]:
    return [id_ for id_ in known if id_ not in taken]


@pytest.mark.parametrize(
    ("size", "expected", "reason"),
    [
        (1, ["U0"], "one card"),
        (2, ["U0", "U1"], "one PCI switch"),
        (3, ["U0", "U1", "U4"], "one NUMA node"),
        (4, ["U0", "U1", "U4", "U5"], "one NUMA node"),
        (8, list(EIGHT), "spread"),
    ],
)
def test_free_host(size: int, expected: list[str], reason: str) -> None:
    assert chosen(size, list(EIGHT)) == (expected, reason)


def test_six_cards_are_three_whole_switches() -> None:
    ids, _ = chosen(6, list(EIGHT))
    pairs = [{"U0", "U1"}, {"U2", "U3"}, {"U4", "U5"}, {"U6", "U7"}]
    assert sum(pair <= set(ids) for pair in pairs) == 3


@pytest.mark.parametrize(
    ("taken", "size", "expected"),
    [
        (("U1",), 1, ["U0"]),  # the switch that is half used already, so that pairs stay whole
        (("U1",), 2, ["U4", "U5"]),  # the pair that is whole, and not one half and another
        (("U0", "U1"), 3, ["U2", "U3", "U6"]),  # only this NUMA node holds three
        (("U0", "U2", "U4", "U6"), 2, ["U1", "U5"]),  # no switch holds two: the NUMA node does
    ],
)
def test_partly_used_host(taken: tuple[str, ...], size: int, expected: list[str]) -> None:
    assert chosen(size, but(*taken))[0] == expected


def test_a_neighbour_of_a_required_device_comes_first() -> None:
    assert chosen(2, list(EIGHT), ["U6"]) == (["U6", "U7"], "one PCI switch")
    assert chosen(2, but("U7"), ["U6"]) == (["U2", "U6"], "one NUMA node")
    assert chosen(3, but("U7"), ["U6"]) == (["U2", "U3", "U6"], "one NUMA node")


def test_free_core_of_a_partly_used_card_comes_before_a_whole_card() -> None:
    free = but("U5_cores_0", known=SINGLE)
    assert chosen(1, free, known=SINGLE)[0] == ["U5_cores_1"]
    ids, _ = chosen(3, free, known=SINGLE)
    assert ids == ["U4_cores_0", "U4_cores_1", "U5_cores_1"]  # then behind its switch


def test_partly_used_cards_come_before_neighbours() -> None:
    free = but("U3_cores_0", "U5_cores_0", known=SINGLE)
    assert chosen(2, free, known=SINGLE) == (["U3_cores_1", "U5_cores_1"], "spread")


def test_cores_of_one_card_stay_together() -> None:
    assert chosen(2, list(SINGLE), known=SINGLE) == (["U0_cores_0", "U0_cores_1"], "one card")
    ids, reason = chosen(8, list(CORES), known=CORES)
    assert (ids, reason) == ([f"U0_cores_{core}" for core in range(8)], "one card")


@pytest.mark.parametrize(
    ("taken", "must", "size", "expected"),
    [
        ((), (), 1, ["U1"]),  # U0 and U4 are degraded
        (("U1",), (), 1, ["U5"]),  # though U0 is half of a pair that is broken already
        ((), (), 2, ["U2", "U3"]),
        (("U2", "U6"), (), 2, ["U0", "U1"]),  # no other pair lies behind one switch
        (("U2", "U3", "U6", "U7"), (), 3, ["U0", "U1", "U5"]),  # one of them it has to be
        ((), ("U4",), 2, ["U4", "U5"]),  # the kubelet has chosen it
        ((), (), 7, ["U0", "U1", "U2", "U3", "U5", "U6", "U7"]),
        (("U1", "U2", "U3", "U5", "U6", "U7"), (), 2, ["U0", "U4"]),
    ],
)
def test_degraded_cards_come_after_the_others_of_equal_fit(
    taken: tuple[str, ...], must: tuple[str, ...], size: int, expected: list[str]
) -> None:
    """A hot card was given to the Pod that replaced the one that had made it hot."""
    free = but(*taken)
    assert chosen(size, free, [*must], degraded=("U0", "U4"))[0] == expected


def test_degraded_cards_come_before_stale_ids() -> None:
    assert chosen(2, ["GONE", "U0", "U1"], degraded=("U0", "U1"))[0] == ["U0", "U1"]
    assert chosen(2, ["GONE", "U0", "U1"], degraded=("U0",))[0] == ["U0", "U1"]


def test_host_that_tells_neither_switches_nor_numa_nodes() -> None:
    plain = {device.id: device for device in devices(*(state(index=index) for index in range(4)))}
    assert chosen(2, list(plain), known=plain) == (["WARBOY-0", "WARBOY-1"], "spread")


def test_cards_right_below_the_root_complex_share_no_switch() -> None:
    cards = [
        state(index=index, numa_node=0, switches=("pci0000:00", f"0000:00:0{index}.0"))
        for index in range(2)
    ]
    known = {device.id: device for device in devices(*cards)}
    assert chosen(2, list(known), known=known)[1] == "one NUMA node"


def test_stale_ids_are_tolerated_and_taken_last() -> None:
    available = ["GONE-1", *but("U1"), "GONE-2"]
    assert chosen(1, available)[0] == ["U0"]
    assert chosen(7, available)[0] == but("U1")
    assert chosen(8, available)[0] == ["GONE-1", *but("U1")]
    assert chosen(2, ["GONE-1", "U3"], ["GONE-1"])[0] == ["GONE-1", "U3"]


class Counted(dict[str, Device]):
    """Counts how often a device is looked up."""

    looked_up = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_up += 1
        return super().__contains__(key)


@pytest.mark.parametrize("known", [EIGHT, CORES])
def test_any_number_of_ids_is_work_in_proportion(known: Mapping[str, Device]) -> None:
    """20,000 of them stopped the event loop for 35 s."""
    counted = Counted(known)
    available = [*known, *(f"GONE-{n}" for n in range(2000))]
    choice = prefer(available, available[-500:], 1500, counted)
    assert len(choice.ids) == 1500
    assert counted.looked_up < 10 * len(available)


def test_the_same_id_twice_counts_once() -> None:
    assert chosen(2, ["U3", "U3", "U2"])[0] == ["U2", "U3"]
    assert chosen(2, ["U3", "U2", "U0"], ["U0", "U0"])[0][0] == "U0"


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        (["U0"], [], 0),
        ([], [], 1),
        (["U0", "U0"], [], 2),
        (["U0"], ["U1"], 1),
        (["U0", "U1"], ["U0", "U1"], 1),
    ],
)
def test_request_that_contradicts_itself(available: list[str], must: list[str], size: int) -> None:
    with pytest.raises(RefusalError, match=f"allocation_size is {size}: ") as refusal:
        prefer(available, must, size, EIGHT)
    assert refusal.value.kind is Refusal.INVALID


Asked = tuple[dict[str, Device], list[str], list[str], int, set[str]]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    known = draw(st.sampled_from((EIGHT, SINGLE, CORES)))
    pool = [*known, "STALE-1", "STALE-2"]
    available = draw(st.lists(st.sampled_from(pool), min_size=1, unique=True))
    must = draw(st.lists(st.sampled_from(available), max_size=3, unique=True))
    size = draw(st.integers(max(1, len(must)), len(available)))
    degraded = draw(st.sets(st.sampled_from([device.card_id for device in known.values()])))
    return known, available, must, size, degraded


@settings(max_examples=50)
@given(requests(), st.randoms(use_true_random=False))
def test_every_choice_is_of_the_right_size_and_does_not_depend_on_the_order_asked(
    request: Asked, shuffler: random.Random
) -> None:
    known, available, must, size, degraded = request
    choice = prefer(available, must, size, known, degraded)
    assert len(choice.ids) == len(set(choice.ids)) == size
    assert set(must) <= set(choice.ids) <= set(available)
    # Stale ones only when there is nothing else.
    stale = [id_ for id_ in choice.ids if id_ not in known and id_ not in must]
    usable = [id_ for id_ in available if id_ in known or id_ in must]
    assert len(stale) == max(0, size - len(usable))
    shuffler.shuffle(available)
    again = prefer(available, must, size, known, degraded)
    assert (again.ids, again.reason) == (choice.ids, choice.reason)
