from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import CoreRange
from npu_agent.core.ledger import Held, reserve
from npu_agent.core.offer import Device, device_id, split_id

RESOURCE = "furiosa.ai/rngd"


def device(card: str, first: int, last: int) -> Device:
    cores = CoreRange(first, last)
    return Device(
        id=device_id(card, None if len(cores) == 8 else cores),
        card_id=card,
        cores=cores,
        name="npu0",
        healthy=True,
        reason="works",
        numa_node=None,
        switches=(),
        order=(0, "rngd", first),
        devnames=(),
        selectors=(),
        nodes=(),
    )


def cut(card: str, width: int) -> tuple[Device, ...]:
    return tuple(device(card, first, first + width - 1) for first in range(0, 8, width))


shapes = st.sampled_from((1, 2, 4, 8))


@given(before=shapes, now=shapes, held=st.integers(0, 7), other=st.booleans())
def test_what_is_offered_has_no_core_of_what_is_held(
    before: int, now: int, held: int, other: bool
) -> None:
    """Whatever the shapes: the devices that overlap are unfit, and no others are."""
    old = next(d for d in cut("A", before) if held in d.cores)
    resource = "beta.furiosa.ai/npu" if other else RESOURCE
    offered = reserve((*cut("A", now), *cut("B", now)), RESOURCE, [Held(resource, old.id, "x")])
    for one in offered:
        same = one.id == old.id and not other
        overlaps = one.card_id == "A" and one.cores.overlaps(old.cores)
        assert one.healthy == (same or not overlaps)


def test_the_reason_names_who_holds_what() -> None:
    held = [Held(RESOURCE, "A", "Pod team/train")]
    fit, unfit = reserve((device("B", 0, 3), device("A", 0, 3)), RESOURCE, held)
    assert fit.healthy
    assert unfit.reason == f"Pod team/train still holds its cores as A of {RESOURCE}"


def test_an_unhealthy_device_stays_so() -> None:
    sick = replace(device("A", 0, 3), healthy=False, reason="alive says 0")
    assert reserve((sick,), RESOURCE, []) == (sick,)


@given(st.text(min_size=1), st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_ids_split_as_they_were_made(card: str, ends: tuple[int, int] | None) -> None:
    cores = None if ends is None else CoreRange(min(ends), max(ends))
    if cores is None and split_id(card) != (card, None):
        return  # a card whose own ID looks like a part's: no driver has one
    assert split_id(device_id(card, cores)) == (card, cores)


def test_foreign_ids_are_whole_cards() -> None:
    for id_ in ("A", "A_cores_", "A_cores_x", "A_cores_0-", "A_cores_1-2-3", "_cores_1"):
        card, cores = split_id(id_)
        assert (card, cores) == (id_, None) or (id_ == "_cores_1" and cores is not None)
