"""ResourceSlices of pools, and what has to be written for them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.pool import PoolDevice
from npu_agent.core.state import TAINTS
from npu_agent.outputs.dra.slices import (
    Writes,
    differs,
    dropped,
    keeping_times,
    name,
    slices,
    writes,
)
from tests.golden import golden
from tests.outputs.dra.cards import card, parts, pool_of, rngd
from tests.outputs.dra.rules import faults, faults_of_pool

GOLDEN = Path(__file__).parent / "golden"
WHERE = {"driver": "npu.furiosa.ai", "node": "npu-node-1", "uid": "7b0c6b1e-2f5f-4d8c-8b3f-1"}


def made(devices: tuple[PoolDevice, ...], generation: int = 1) -> tuple[dict[str, Any], ...]:
    return slices(devices, **WHERE, generation=generation)


def live(*found: Mapping[str, Any]) -> dict[str, Any]:
    """As the API server answers: a deep copy, with what it adds and without what it omits."""
    answer = {}
    for at, each in enumerate(copy.deepcopy(found)):
        meta = {**each["metadata"], "uid": f"uid-{at}", "resourceVersion": str(100 + at)}
        spec = {key: value for key, value in each["spec"].items() if value != []}
        for device in spec.get("devices", ()):
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")
        answer[meta["name"]] = {**each, "metadata": meta, "spec": spec}
    return answer


def planned(
    there: Mapping[str, Any], devices: tuple[PoolDevice, ...], generation: int = 1, **where: str
) -> Writes:
    def pool(of: int) -> tuple[dict[str, Any], ...]:
        return slices(devices, **(WHERE | where), generation=of)

    return writes(there, pool, generation=generation)


# What they are.

PICTURES: dict[str, tuple[CardState, ...]] = {
    "warboy": (card("warboy", 0),),
    "mixed": (card("warboy", 0), card("rngd", 0), card("rngd", 1)),
    "unhealthy": (card("rngd", 0), card("rngd", 1, health=HealthState.UNHEALTHY), card("rngd", 2)),
    "none": (),
    "cut": (card("warboy", 0), card("rngd", 1)),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_slices_are_the_golden_ones(picture: str) -> None:
    options = {"evict": picture == "unhealthy", "partitions": picture == "cut"}
    found = made(pool_of(*PICTURES[picture], **options))
    # Without YAML's references for what the slices share.
    text = yaml.safe_dump_all(
        json.loads(json.dumps(found)), sort_keys=False, default_flow_style=None, width=1000
    )
    assert text == golden(GOLDEN / f"{picture}.yaml", text)
    assert [faults(each) for each in found] == [[]] * len(found)
    assert faults_of_pool(found) == []


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, [0]), (64, [64]), (65, [64, 1]), (129, [64, 64, 1])],
)
def test_no_slice_has_more_devices_than_may_be_tainted(count: int, sizes: list[int]) -> None:
    found = made(rngd(count, unhealthy=tuple(range(count))))
    assert [len(each["spec"]["devices"]) for each in found] == sizes
    assert {each["spec"]["pool"]["resourceSliceCount"] for each in found} == {len(sizes)}
    assert [faults(each) for each in found] == [[]] * len(sizes)


# Cards that are cut on demand.


def sizes(found: tuple[Mapping[str, Any], ...]) -> list[tuple[int, int]]:
    """Of each slice, the sets of counters and the devices."""
    specs = [each["spec"] for each in found]
    return [(len(s.get("sharedCounters", ())), len(s.get("devices", ()))) for s in specs]


@pytest.mark.parametrize(
    ("cards", "wanted"),
    [
        (4, [(4, 0), (0, 60)]),
        (5, [(5, 0), (0, 60), (0, 15)]),
        (9, [(8, 0), (1, 0), (0, 60), (0, 60), (0, 15)]),
    ],
)
def test_counters_come_first_and_all_devices_of_a_card_are_in_one_slice(
    cards: int, wanted: list[tuple[int, int]]
) -> None:
    found = made(parts(cards, unhealthy=tuple(range(cards))))
    assert sizes(found) == wanted
    assert [faults(each) for each in found] == [[]] * len(found)
    assert faults_of_pool(found) == []


KINDS = st.sampled_from(("warboy", "rngd"))


@given(st.lists(st.tuples(KINDS, st.booleans()), max_size=40))
def test_any_pool_that_is_cut_is_one_that_scheduler_and_api_server_take(
    kinds: list[tuple[str, bool]],
) -> None:
    cards = [
        card(kind, index, health=HealthState.UNHEALTHY if unhealthy else HealthState.HEALTHY)
        for index, (kind, unhealthy) in enumerate(kinds)
    ]
    found = made(pool_of(*cards, partitions=True))
    assert [faults(each) for each in found] == [[]] * len(found)
    assert faults_of_pool(found) == []
    homes: dict[str, set[str]] = {}
    for each in found:
        for device in each["spec"].get("devices", ()):
            card_id = device["attributes"]["uuid"]["string"]
            homes.setdefault(card_id, set()).add(each["metadata"]["name"])
    assert all(len(slices) == 1 for slices in homes.values())


def test_counters_are_written_before_devices_and_present_slices_before_new_ones() -> None:
    whole, cut = made(rngd(9), 5), made(parts(9), 6)
    found = planned(live(*whole), parts(9))
    assert (found.delete, found.apply) == ((), cut)
    for gone, wanted in (
        (0, ["00001", "00000", "00002", "00003", "00004"]),
        (2, ["00000", "00001", "00003", "00004", "00002"]),
    ):
        there = live(*made(parts(9), 5))
        del there[made(parts(9))[gone]["metadata"]["name"]]
        found = planned(there, parts(9, unhealthy=(0, 8)))
        assert [each["metadata"]["name"][:5] for each in found.apply] == wanted


def test_a_pool_that_is_no_longer_cut_deletes_first() -> None:
    found = planned(live(*made(parts(9), 5)), rngd(9))
    assert [each[:5] for each in found.delete] == ["00001", "00002", "00003", "00004"]
    assert found.apply == made(rngd(9), 6)


# What has to be written.


def test_no_slice_is_written_without_a_change() -> None:
    for devices in (rngd(8, unhealthy=(3,)), rngd(70), ()):
        assert planned(live(*made(devices)), devices) == Writes()


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (rngd(8), rngd(8, unhealthy=(2,)), 0),
        (rngd(70), rngd(70, unhealthy=(69,)), 1),
        (parts(16), parts(16, unhealthy=(6,)), 3),
    ],
    ids=["the only one", "one of two", "of cards that are cut"],
)
def test_a_changed_slice_is_changed_in_place(
    before: tuple[PoolDevice, ...], after: tuple[PoolDevice, ...], changed: int
) -> None:
    """The pool stays complete, and each state of it is a good one."""
    found = planned(live(*made(before, 5)), after)
    assert (found.delete, found.apply) == ((), (made(after, 5)[changed],))


@pytest.mark.parametrize(
    ("before", "after", "unhealthy", "delete", "apply"),
    [(64, 65, (), 0, 2), (65, 64, (), 1, 1), (70, 0, (), 1, 1), (70, 70, (0, 69), 0, 2)],
)
def test_several_calls_are_another_generation(
    before: int, after: int, unhealthy: tuple[int, ...], delete: int, apply: int
) -> None:
    found = planned(live(*made(rngd(before), 5)), rngd(after, unhealthy))
    assert (len(found.delete), len(found.apply)) == (delete, apply)
    assert found.apply == made(rngd(after, unhealthy), 6)


def test_a_write_that_ended_halfway_is_completed() -> None:
    old, new = made(rngd(70), 5), made(rngd(70, unhealthy=(0, 69)), 6)
    found = planned(live(new[0], old[1]), rngd(70, unhealthy=(0, 69)))
    assert (found.delete, found.apply) == ((), new[1:])


def test_the_name_of_a_slice_is_one_for_the_api_server() -> None:
    driver = "npu.furiosa.ai"
    assert name(1, driver, "node-1") == "00001-npu.furiosa.ai-node-1"
    for length in range(200, 248):
        node = "a" * length + "." + "b" * 5
        cut = name(1, driver, node)
        assert len(cut) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", cut)
        assert cut != name(1, driver, node + "c")
        assert cut != name(2, driver, node)


def test_slices_of_another_name_are_deleted() -> None:
    devices = rngd(2)
    other = copy.deepcopy(made(devices)[0])
    other["metadata"]["name"] = "00000-npu.furiosa.ai-npu-node-1-x7k2p"
    found = planned(live(*made(devices), other), devices)
    assert found == Writes(delete=(other["metadata"]["name"],))


def test_the_generation_never_goes_back() -> None:
    found = planned({}, rngd(1), generation=7)
    assert found.apply == made(rngd(1), 7)
    assert planned({}, rngd(70), generation=7).apply == made(rngd(70), 8)


def test_a_node_that_was_created_again_owns_them() -> None:
    found = planned(live(*made(rngd(1))), rngd(1), uid="another")
    assert [each["metadata"]["ownerReferences"][0]["uid"] for each in found.apply] == ["another"]


@pytest.mark.parametrize(
    "change",
    [
        {"nodeName": "another"},
        {"pool": {"name": "npu-node-1", "generation": 1, "resourceSliceCount": 2}},
        {"devices": []},
        {"allNodes": True},
    ],
)
def test_changes_of_other_clients_are_undone(change: dict[str, Any]) -> None:
    (there,) = live(*made(rngd(1))).values()
    assert not differs(there, made(rngd(1))[0])
    assert differs({**there, "spec": {**there["spec"], **change}}, made(rngd(1))[0])


def test_any_change_of_a_device_is_a_difference_and_its_taints_time_is_none() -> None:
    wanted = made(rngd(2, unhealthy=(1,)))[0]
    (there,) = live(wanted).values()
    taint = there["spec"]["devices"][1]["taints"][0]
    taint["timeAdded"] = "2001-01-01T00:00:00Z"
    assert not differs(there, wanted)
    for key, value in (("effect", "NoExecute"), ("key", "other"), ("value", "x")):
        before = dict(taint)
        taint[key] = value
        assert differs(there, wanted), key
        taint.clear()
        taint.update(before)
    there["spec"]["devices"][0]["attributes"]["index"]["int"] = 9
    assert differs(there, wanted)


# The replies.


def test_fields_that_the_api_server_drops_are_named() -> None:
    sent = made(rngd(3, unhealthy=(0, 2)))[0]
    (reply,) = live(sent).values()
    assert dropped(sent, reply) == ()
    for device in reply["spec"]["devices"]:
        device.pop("taints", None)
    assert dropped(sent, reply) == (TAINTS,)


# The times of taints.


def times(found: Mapping[str, Any]) -> list[str | None]:
    return [
        taint.get("timeAdded")
        for device in found["spec"]["devices"]
        for taint in device.get("taints", ())
    ]


def test_a_taint_keeps_its_time_and_a_new_one_gets_the_servers() -> None:
    there = live(*made(rngd(3, unhealthy=(1,))))
    wanted = made(rngd(3, unhealthy=(1, 2)))[0]
    assert times(keeping_times(wanted, there)) == ["2026-01-01T00:00:00Z", None]
    assert times(wanted) == [None, None]


def test_a_taint_with_another_effect_is_another_taint() -> None:
    there = live(*made(rngd(1, unhealthy=(0,))))
    unhealthy = card("rngd", 0, health=HealthState.UNHEALTHY)
    (evicting,) = made(pool_of(unhealthy, evict=True))
    assert times(keeping_times(evicting, there)) == [None]


def test_a_device_keeps_its_taints_time_in_another_slice() -> None:
    there = live(*made(rngd(65, unhealthy=(64,))))
    (wanted,) = made(rngd(65, unhealthy=(64,))[1:])
    assert times(keeping_times(wanted, there)) == ["2026-01-01T00:00:00Z"]
