import gc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.offer import Device, advertise, cut
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.golden import golden
from tests.outputs.deviceplugin.helpers import (
    devices,
    devnames,
    resources,
    selectors,
    snapshot,
    state,
)

GOLDEN = Path(__file__).parent / "golden"

SHAPES = [("warboy", None), ("warboy", 1), ("rngd", None), ("rngd", 1), ("rngd", 2), ("rngd", 4)]


def shown(device: Device) -> str:
    return "\n".join(
        (
            f"{device.id} ({device.name})",
            f"  {'Healthy' if device.healthy else 'Unhealthy'}: {device.reason}",
            f"  NUMA node {device.card.numa_node}, switches {' '.join(device.card.switches)}",
            f"  NPU_DEVNAME={','.join(devnames(device))}",
            f"  FURIOSA_DEVICES={','.join(selectors(device))}",
            f"  {' '.join(device.nodes)}",
        )
    )


@pytest.mark.parametrize(("family", "cores"), SHAPES)
def test_devices_of_a_card_are_the_golden_ones(family: str, cores: int | None) -> None:
    card = state(family, 3, numa_node=1, switches=("pci0000:00", "0000:00:01.0"))
    found = "\n".join(map(shown, devices(card, cores=cores))) + "\n"
    name = f"{family}-{cores or 'whole'}.txt"
    assert found == golden(GOLDEN / name, found)


def test_devices_are_kept_with_their_card_and_no_longer() -> None:
    card = state("rngd", 937)
    assert cut(card, 2) is cut(replace(card), 2)
    unhealthy = replace(
        card, health=replace(card.health, reason="hot", state=HealthState.UNHEALTHY)
    )
    assert not any(device.healthy for device in cut(unhealthy, 2))
    assert all(device.healthy for device in cut(card, 2))

    number = card.card.index
    del card, unhealthy
    gc.collect()
    left = [device for device in gc.get_objects() if isinstance(device, Device)]
    assert number not in {device.card.index for device in left}


@pytest.mark.parametrize(
    ("missing", "covering"),
    [
        (("pe0-3",), ("npu0pe0-1", "npu0pe2-3", "npu0pe4-7")),
        (("pe0-3", "pe0-1"), ("npu0pe0", "npu0pe1", "npu0pe2-3", "npu0pe4-7")),
        (("pe4-7", "pe6-7"), ("npu0pe0-3", "npu0pe4-5", "npu0pe6", "npu0pe7")),
        (("pe0",), ("npu0pe0-3", "npu0pe4-7")),  # a fused node covers it
    ],
)
def test_missing_pe_nodes_are_made_up_for_by_narrower_ones(
    missing: tuple[str, ...], covering: tuple[str, ...]
) -> None:
    (device,) = devices(state("rngd", 0, missing=missing))
    assert device.healthy
    assert devnames(device) == covering
    assert not {f"rngd/npu0{gone}" for gone in missing} & set(device.nodes)


def test_core_without_any_node_makes_its_device_unhealthy_and_no_other() -> None:
    first, second = devices(state(missing=("pe1", "pe0-1")), cores=1)
    assert first.healthy
    assert not second.healthy
    assert second.reason == "no device node for core 1: /dev/npu0pe1 is missing"
    assert second.nodes  # what is there is still told


def test_unhealthy_card_is_listed_with_its_reason_and_unknown_is_not_fenced() -> None:
    bad = state(index=0, health=HealthState.UNHEALTHY, reason="alive says 0")
    silent = state(index=1, health=HealthState.UNKNOWN, reason="the driver does not say")
    first, second = devices(bad, silent)
    assert (first.healthy, first.reason) == (False, "alive says 0")
    assert second.healthy


@pytest.mark.parametrize("word", ["npu1", "ab-cd", "0000:6d:00.0", "serial-9"])
def test_disabled_by_any_name(word: str) -> None:
    cards = snapshot(
        state(index=0),
        state(index=1, id_="SERIAL-9", uuid="AB-CD", pci_bus_id="0000:6D:00.0"),
        state(index=2),
    )
    (resource,) = resources("r/r", None)
    assert [d.name for d in advertise(cards, resource, [word])] == ["npu0", "npu2"]


def test_disabled_word_that_names_no_card_changes_nothing() -> None:
    (resource,) = resources("r/r", None)
    assert len(advertise(snapshot(state()), resource, ["npu", "npu00", ""])) == 1


def test_id_follows_the_card_and_not_its_number() -> None:
    for cores in (None, 1):
        before = devices(state(index=0, id_="UUID-A"), cores=cores)
        after = devices(state(index=5, id_="UUID-A"), cores=cores)
        assert [d.id for d in before] == [d.id for d in after]
        assert [devnames(d) for d in before] != [devnames(d) for d in after]


def test_devices_are_sorted_by_number_and_not_by_text() -> None:
    cards = [state(index=index) for index in (2, 10)]
    assert [d.order for d in devices(*cards, cores=1)] == [
        (2, "warboy", 0),
        (2, "warboy", 1),
        (10, "warboy", 0),
        (10, "warboy", 1),
    ]


def cards() -> st.SearchStrategy[Snapshot]:
    """Hosts with any mixture of cards, whose longest possible IDs are among theirs."""
    one = st.builds(
        lambda family, index, health, missing, numa: state(
            family,
            index,
            id_=f"{family}{index:04}".ljust(50, "x"),
            health=health,
            missing=missing,
            numa_node=numa,
        ),
        st.sampled_from(sorted(FAMILIES)),
        st.integers(0, 40),
        st.sampled_from(HealthState),
        st.lists(st.sampled_from(("pe0", "pe1", "pe0-1", "pe0-3", "pe6"))).map(tuple),
        st.none() | st.integers(0, 3),
    )
    unique = st.lists(one, max_size=12, unique_by=lambda s: s.card.key)
    return unique.map(
        lambda found: snapshot(*sorted(found, key=lambda s: (s.card.index, s.card.family)))
    )


@settings(max_examples=30)
@given(
    cards(),
    st.sampled_from((None, 1)),
    st.sampled_from((None, 1, 2, 4, 8)),
    st.sampled_from((None, 1, 2)),
)
def test_no_core_is_in_two_devices_and_none_is_lost(
    host: Snapshot, default: int | None, rngd: int | None, warboy: int | None
) -> None:
    overrides = [("f/rngd", "rngd", rngd)] if rngd else []
    overrides += [("f/warboy", "warboy", warboy)] if warboy else []
    found = [
        device
        for resource in resources("d/npu", default, tuple(overrides))
        for device in advertise(host, resource)
    ]
    ids = [device.id for device in found]
    assert len(set(ids)) == len(ids)
    assert all(len(id_) <= 63 for id_ in ids)
    covered = [(device.card_id, core) for device in found for core in _cores(device, host)]
    everything = [(s.id, core) for s in host.cards for core in range(_count(s))]
    assert sorted(covered) == sorted(everything)
    for device in found:
        card = next(s.card for s in host.cards if s.id == device.card_id)
        assert set(device.nodes) <= card.nodes
        whole_card = device.cores == device.card.all_cores and device.card.family == "rngd"
        assert len(selectors(device)) == (1 if whole_card else len(devnames(device)))


def _count(card: CardState) -> int:
    return FAMILIES[card.card.family].core_count


def _cores(device: Device, host: Snapshot) -> range:
    """The cores of a device, read from its ID as a person would."""
    card_id, partly, cores = device.id.partition("_cores_")
    if not partly:
        return range(_count(next(s for s in host.cards if s.id == card_id)))
    first, _, last = cores.partition("-")
    return range(int(first), int(last or first) + 1)
