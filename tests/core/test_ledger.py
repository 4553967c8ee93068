"""What the ledger says of cards that change under a holder, case by case."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from npu_agent.core.hardware import Card, CardState, CoreRange, Health, HealthState
from npu_agent.core.ledger import (
    HOLDER_ENDS,
    SETTLED,
    UNIDENTIFIED,
    UNSEEN,
    Assignment,
    DeviceName,
    Ledger,
    PreparedClaim,
    PreparedDevice,
    Usage,
    footprint,
    footprints_of,
)
from npu_agent.core.offer import Device, advertise
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import resources, snapshot

NPU = "beta.furiosa.ai/npu"


def card(index: int = 0, family: str = "warboy", **identity: Any) -> Card:
    nodes = frozenset(FAMILIES[family].nodes(index))
    return FAMILIES[family].card(index, product=family, nodes=nodes, **identity)


OF_A: dict[str, Any] = {"uuid": "U0", "serial": "S0", "pci_bus_id": "0000:01:00.0"}
OF_B: dict[str, Any] = {"uuid": "U1", "serial": "S1", "pci_bus_id": "0000:02:00.0"}
A, B = card(0, **OF_A), card(1, **OF_B)
TWIN = card(1, **{**OF_B, "uuid": "U0"})
"""A second card with the UUID of A."""


def state(of: Card, id_: str | None = None) -> CardState:
    health = Health(state=HealthState.HEALTHY, reason="works", since=0.0)
    return CardState(id=id_ or of.uuid or of.serial or "", card=of, health=health)


def offered(*cards: Card, cores: int | None = None) -> tuple[Device, ...]:
    (resource,) = resources(NPU, cores)
    return advertise(snapshot(*map(state, cards)), resource)


def pod(device: str, name: str = "train", resource: str = NPU) -> Assignment:
    return Assignment("team", name, "main", resource, device)


def answered(ledger: Ledger, *held: Assignment, at: float, cards: Iterable[Card] = ()) -> Ledger:
    return ledger.with_answer(held, at, cards=cards, resources=[NPU])


def against(ledger: Ledger, *cards: Card, cores: int | None = None) -> dict[str, str | None]:
    """What speaks against each device of these cards."""
    conflicts = ledger.conflicts(cards)
    return {
        one.id: conflicts.against(DeviceName(NPU, one.id), one)
        for one in offered(*cards, cores=cores)
    }


def held(*cards: Card, by: str, cores: int | None = None) -> Ledger:
    """A ledger of an agent that granted one device, which a Pod holds."""
    devices = offered(*cards, cores=cores)
    ledger = Ledger().with_offer({NPU: devices}, map(state, cards))
    ledger = ledger.with_grant(NPU, [one for one in devices if one.id == by], 0.0)
    return answered(ledger, pod(by), at=10.0, cards=cards)


@pytest.mark.parametrize(("uuid", "serial"), [("U_cores_0", "U"), ("U", "U_cores_0")])
def test_an_id_that_is_a_whole_cards_is_no_part_of_it(uuid: str, serial: str) -> None:
    (found,) = footprints_of("U_cores_0", [replace(A, uuid=uuid, serial=serial)])
    assert found.cores == A.all_cores


def test_held_cores_are_not_free_in_another_shape() -> None:
    assert against(held(A, B, by="U0"), A, B, cores=1) == {
        "U0_cores_0": "Pod team/train still holds its cores as U0 of beta.furiosa.ai/npu",
        "U0_cores_1": "Pod team/train still holds its cores as U0 of beta.furiosa.ai/npu",
        "U1_cores_0": None,
        "U1_cores_1": None,
    }


def test_other_cores_of_the_card_are_free_although_they_share_nodes() -> None:
    assert against(held(A, by="U0_cores_0", cores=1), A, cores=1)["U0_cores_1"] is None


def test_held_cores_are_not_free_for_another_resource() -> None:
    ledger = answered(Ledger(), pod("U0", resource="furiosa.ai/warboy"), at=1.0, cards=[A, B])
    assert against(ledger, A, B) == {
        "U0": "Pod team/train still holds its cores as U0 of furiosa.ai/warboy",
        "U1": None,
    }


def test_a_second_card_with_the_uuid_of_a_held_one_is_not_free() -> None:
    conflicts = held(A, by="U0").conflicts([A, TWIN])
    (resource,) = resources(NPU, None)
    devices = advertise(snapshot(state(A, "U0"), state(TWIN, "S1")), resource)
    assert [conflicts.against(DeviceName(NPU, one.id), one) for one in devices] == [
        None,  # U0 itself: the kubelet does not give it away twice
        "Pod team/train still holds its cores as U0 of beta.furiosa.ai/npu",
    ]
    # Had the known card lost its ID to the newcomer, it would not be free either.
    fallen_back = advertise(snapshot(state(A, "S0"), state(TWIN, "S1")), resource)
    assert all(conflicts.against(DeviceName(NPU, one.id), one) for one in fallen_back)


def test_cores_next_to_held_ones_are_not_free_once_another_card_has_the_same_identity() -> None:
    conflicts = held(A, by="U0_cores_0", cores=1).conflicts([A, TWIN])
    other = offered(A, cores=1)[1]
    assert conflicts.against(DeviceName(NPU, other.id), other) == (
        "Pod team/train still holds /dev/npu0_mgmt as U0_cores_0 of beta.furiosa.ai/npu"
    )


@pytest.mark.parametrize("lost", ["uuid", "serial", "pci_bus_id"])
def test_a_held_card_is_known_by_whatever_is_left_of_its_identity(lost: str) -> None:
    """Over a restart, too: `device_uuid` may not be readable then."""
    before = held(A, by="U0")
    after = Ledger().with_predecessor(before, 100.0)
    changed = card(4, **{**OF_A, lost: None})  # and it has another number
    for ledger in (before, answered(after, pod("U0"), at=101.0, cards=[changed])):
        reason = ledger.conflicts([changed]).against(
            DeviceName("other/name", "U0"), offered(changed)[0]
        )
        assert reason == "Pod team/train still holds its cores as U0 of beta.furiosa.ai/npu"


def test_a_card_that_took_the_number_of_a_held_one_is_not_free() -> None:
    ledger = held(A, B, by="U0")
    assert against(ledger, card(0, **OF_B), card(1, **OF_A)) == {
        "U0": None,
        "U1": "Pod team/train still holds /dev/npu0 as U0 of beta.furiosa.ai/npu",
    }
    assert against(ledger, A, B) == {"U0": None, "U1": None}


def test_an_id_that_no_card_can_have_may_be_any_card() -> None:
    ledger = answered(Ledger(), pod("strange"), at=1.0, cards=[A])
    assert against(ledger, A)["U0"] == (
        "Pod team/train holds strange of beta.furiosa.ai/npu, and no card here has that ID"
    )
    # It is understood as soon as the card says its UUID again.
    hidden = card(0, serial="S0")
    ledger = answered(Ledger(), pod("U0"), at=1.0, cards=[hidden])
    assert against(ledger, hidden)["S0"]
    ledger = answered(ledger, pod("U0"), at=2.0, cards=[A, B])
    assert against(ledger, A, B) == {"U0": None, "U1": None}


def test_devices_of_other_plugins_do_not_matter() -> None:
    ledger = answered(Ledger(), pod("GPU-1", resource="nvidia.com/gpu"), at=1.0, cards=[A])
    assert ledger == Ledger()


def test_a_grant_is_held_until_two_answers_lack_it() -> None:
    ledger = Ledger().with_offer({NPU: offered(A)}, [state(A)]).with_grant(NPU, offered(A), 100.0)

    def free() -> bool:
        return not any(against(ledger, A, cores=1).values())

    ledger = answered(ledger, at=100.0 + SETTLED / 2, cards=[A])
    assert not free()
    ledger = answered(ledger, pod("U0"), at=102.0, cards=[A])
    assert not ledger.pending_release
    ledger = answered(ledger, at=110.0, cards=[A])
    assert ledger.pending_release
    ledger = answered(ledger, at=110.0 + SETTLED / 2, cards=[A])
    assert not free()
    ledger = answered(ledger, at=110.0 + SETTLED, cards=[A])
    assert free()
    assert not ledger.pending_release


def test_an_answer_that_contradicts_itself_ends_nothing() -> None:
    ledger = held(A, by="U0")
    ledger = answered(ledger, at=20.0, cards=[A])
    ledger = answered(ledger, pod("U0"), at=25.0, cards=[A])
    ledger = answered(ledger, at=30.0, cards=[A])
    assert all(against(ledger, A, cores=1).values())


def test_a_grant_that_is_never_shown_is_held_for_a_while() -> None:
    """The kubelet does not list init containers."""
    ledger = Ledger().with_grant(NPU, offered(A), 100.0)
    for at in (102.0, 104.0, 100.0 + UNSEEN - 1):
        ledger = answered(ledger, at=at, cards=[A])
        assert ledger.pending_release  # a Pod that is seen once need not be waited for
    assert all(against(ledger, A, cores=1).values())
    ledger = answered(ledger, at=100.0 + UNSEEN, cards=[A])
    ledger = answered(ledger, at=100.0 + UNSEEN + SETTLED, cards=[A])
    assert not ledger.allocations


def test_an_answer_from_before_a_grant_names_the_holder_before() -> None:
    ledger = held(A, by="U0").with_grant(NPU, offered(A), 100.0)
    ledger = answered(ledger, pod("U0", "the one before"), at=99.0, cards=[A])
    assert against(ledger, A, cores=1)["U0_cores_0"] == (
        "a container that starts still holds its cores as U0 of beta.furiosa.ai/npu"
    )


def test_a_kubelet_that_has_just_started_ends_nothing() -> None:
    ledger = held(A, by="U0").with_grace_period(50.0)
    for at in (30.0, 40.0, 49.0):
        ledger = answered(ledger, at=at, cards=[A])
    assert all(against(ledger, A, cores=1).values())
    for at in (50.0, 55.0):
        ledger = answered(ledger, at=at, cards=[A])
    assert not ledger.allocations


def test_after_a_restart_all_that_was_offered_may_be_held() -> None:
    """A SIGKILL may come between an Allocate and anything that could have been noted of it."""
    before = Ledger().with_offer({NPU: offered(A)}, [state(A)])
    ledger = Ledger().with_predecessor(before, 100.0)
    for at in (98.0, 99.0):  # asked for before the start: they say nothing of the last grants
        ledger = answered(ledger, at=at, cards=[A])
    ledger = answered(ledger, at=100.0, cards=[A])
    assert against(ledger, A) == {"U0": None}
    assert against(ledger, A, cores=1)["U0_cores_1"] == (
        "a container from before the agent's start still holds its cores as U0 of "
        "beta.furiosa.ai/npu"
    )
    assert not answered(ledger, at=101.0, cards=[A]).allocations


def test_a_held_device_is_known_over_two_restarts() -> None:
    """The first of the two agents never offered what the one before it had granted."""
    record = held(A, by="U0")
    for _ in range(2):
        ledger = Ledger().with_predecessor(record, 100.0)
        record = ledger.with_offer({NPU: offered(B)}, [state(B)])
    assert all(against(Ledger().with_predecessor(record, 200.0), A, cores=1).values())


def test_a_card_keeps_its_id_over_a_restart() -> None:
    record = Ledger().with_offer({NPU: offered(A)}, [state(A)])
    assert Ledger().with_predecessor(record, 0.0).cards == {
        "U0": {"uuid:U0", "serial:S0", "pci:0000:01:00.0", "name:warboy-0"}
    }


def test_cards_in_slices_are_known_over_a_restart() -> None:
    before = Ledger().with_published("npu.example.com", map(state, (A, B)))
    after = Ledger().with_predecessor(before, 0.0)
    assert after.published == before.published
    assert after.is_published("U0", A)
    # Under another ID it is the same card; and another card is not.
    assert after.is_published("S0", card(0, serial="S0"))
    assert not after.is_published("U2", card(2, uuid="U2", serial="S2"))
    left = after.without_published({"U0"})
    assert not left.is_published("U0", A)
    assert left.is_published("U1", B)
    assert Ledger().with_predecessor(left.without_published({"U1"}), 0.0).published == {}


def test_holdings_name_the_card_and_its_cores() -> None:
    ledger = held(A, B, by="U0_cores_1", cores=1)
    assert ledger.usages(map(state, (A, B))) == (Usage("U0", CoreRange(1, 1), pod("U0_cores_1")),)
    assert ledger.usages([state(B)]) == ()
    assert answered(ledger, at=20.0, cards=[A, B]).usages(map(state, (A, B))) == ()


def claim(*devices: PreparedDevice) -> PreparedClaim:
    return PreparedClaim(
        driver="npu.example.com",
        uid="uid-c",
        namespace="team",
        name="c",
        pods=("train",),
        devices=devices,
    )


def prepared(request: str, device: Device, *, admin: bool = False) -> PreparedDevice:
    return PreparedDevice(
        request=request, pool="node", device=device.id, admin=admin, footprint=footprint(device)
    )


def used(container: str, *devices: str) -> list[Assignment]:
    """As the kubelet shows a container of the Pod train that uses the claim."""
    return [
        Assignment("team", "train", container, "npu.example.com", device, "c") for device in devices
    ]


def holders(ledger: Ledger, *uses: Assignment) -> set[tuple[str, str]]:
    """Each held card with the container that has it."""
    found = ledger.usages(map(state, (A, B)), uses)
    return {(one.card_id, one.assignment.container) for one in found}


def test_an_administrator_is_no_holder() -> None:
    mine, watched = offered(A, B)
    ledger = Ledger().with_claim(claim(prepared("a", mine), prepared("b", watched, admin=True)))
    assert holders(ledger, *used("main", mine.id, watched.id)) == {("U0", "main")}
    assert against(ledger, B) == {"U1": None}
    assert Ledger().with_predecessor(ledger, 0.0).prepared == ledger.prepared


def test_which_container_has_a_device_of_a_claim() -> None:
    one, other = offered(A, B)
    alike = Ledger().with_claim(claim(prepared("r", one), prepared("r", other)))
    both = [*used("first", one.id, other.id), *used("second", one.id, other.id)]
    shared = {(card, name) for card in ("U0", "U1") for name in ("first", "second")}
    assert holders(alike, *both) == shared
    # The kubelet shows all devices to a container that names one of several requests.
    several = Ledger().with_claim(claim(prepared("r", one), prepared("s", other)))
    assert holders(several, *both) == {("U0", ""), ("U1", "")}
    assert holders(several, *used("first", one.id, other.id)) == {("U0", "first"), ("U1", "first")}
    assert holders(several) == {("U0", ""), ("U1", "")}


def again(before: Device, after: Device, *pods: str, running: Collection[str] = ("a",)) -> Ledger:
    """A claim that was prepared for the Pod ``a``, and is again for these Pods."""
    first = replace(claim(prepared("r", before)), pod_uids=("a",))
    then = replace(claim(prepared("r", after)), pod_uids=pods)
    return Ledger().with_claim(first).before_replacing(then, running, 1.0).with_claim(then)


def left(ledger: Ledger, device: Device, *pods: str) -> str | None:
    """Why another claim, or that of these Pods, does not get a device once ours is unprepared."""
    return ledger.without_claim("uid-c").conflicts([A, B]).against(None, device, pods)


KEEPS = "(ResourceClaim team/c; not listed by the kubelet, but its containers still run)"


def test_a_claim_that_is_allocated_anew_leaves_its_card_to_the_pods_that_live_on_it() -> None:
    one, other = offered(A, B)
    ledger = again(one, other, "b")
    assert left(ledger, one) == f"Pod team/train {KEEPS} still holds its cores"
    assert left(ledger, other) is None
    assert left(again(one, other, "b", running=()), one) is None
    # Nor are they forgotten when it is prepared a third time.
    third = replace(claim(prepared("r", one)), pod_uids=("c",))
    assert left(ledger.before_replacing(third, ["a", "b"], 2.0).with_claim(third), one)


def test_a_claim_that_is_prepared_for_another_pod_knows_the_one_before() -> None:
    (one,) = offered(A)
    ledger = again(one, one, "b")
    assert ledger.prepared["uid-c"].pod_uids == ("b",)
    assert left(ledger, one) == f"Pod team/train {KEEPS} still holds its cores"
    ledger = ledger.with_answer([], 2.0, cards=[A], resources=[NPU])
    assert left(ledger, one) is None


def test_an_orphan_of_a_claim_that_pods_share_has_its_own_name() -> None:
    (mine,) = offered(A)
    both = replace(claim(prepared("r", mine)), pods=("train", "later"), pod_uids=("a", "b"))
    ledger = Ledger().with_orphans(["b"], both, 1.0)
    assert ledger.orphans["b"].by == f"Pod team/later {KEEPS}"
    # A user that is no Pod has a name and no UID.
    mixed = replace(both, pods=("job", "train", "later"))
    assert Ledger().with_orphans(["b"], mixed, 1.0).orphans["b"].by == f"Pod team/job {KEEPS}"


def test_a_pod_does_not_keep_a_card_from_itself() -> None:
    """Its card got another number while it ran."""
    (one,) = offered(A)
    renumbered = replace(one, nodes=("npu5",))
    ledger = again(one, renumbered, "a")
    assert left(ledger, one, "b")
    assert left(ledger, renumbered, "a") is None
    assert again(one, one, "a").orphans == {}


def test_a_pod_that_is_listed_for_another_device_keeps_its_claims_devices() -> None:
    one, other = offered(A, B)
    nic = pod("eth0", resource="example.com/nic")
    ledger = again(one, other, "b").with_answer(
        [nic],
        2.0,
        cards=[A, B],
        resources=[NPU],
        pods={nic.name: frozenset({"a"})},
        cgroups={"a": True},
    )
    assert left(ledger, one) == f"Pod team/train {KEEPS} still holds its cores"


def test_a_claim_prepared_since_counts_and_not_an_older_record() -> None:
    one, other = offered(A, B)
    record = Ledger().with_claim(claim(prepared("r", one)))
    since = Ledger().with_claim(claim(prepared("r", other)))
    assert since.with_predecessor(record, 0.0).prepared == since.prepared


def joined(name: str = "later", device: str = "U0") -> Ledger:
    """The claim is prepared for the Pod train, and another one is listed with it."""
    (mine,) = offered(A)
    first = replace(claim(prepared("r", mine)), pod_uids=("a",))
    use = Assignment("team", name, "main", "npu.example.com", device, "c")
    return Ledger().with_claim(first).with_uses([*used("main", "U0"), use])


def test_a_pod_that_comes_to_share_a_claim_is_unidentified() -> None:
    assert joined().prepared["uid-c"].unidentified == ("later",)
    assert joined().with_uses([]) == joined()
    assert joined("train").prepared["uid-c"].unidentified == ()
    # A claim of the same name that was made again has another device, or none yet.
    for device in ("U1", ""):
        assert joined(device=device).prepared["uid-c"].unidentified == ()


def test_a_claim_that_ends_leaves_its_cores_to_a_pod_that_is_unidentified() -> None:
    ledger = joined()
    ledger = ledger.with_unidentified(ledger.prepared["uid-c"], 100.0).without_claim("uid-c")
    reason = (
        "Pod team/later (ResourceClaim team/c; its UID is not known, so its containers may still "
        "run) still holds its cores"
    )
    for at in (101.0, 100.0 + UNIDENTIFIED):
        ledger = answered(ledger, at=at, cards=[A])
        assert against(ledger, A) == {"U0": reason}
    after = Ledger().with_predecessor(ledger, 5000.0)
    assert against(answered(after, at=5100.0, cards=[A]), A) == {"U0": reason}
    assert answered(ledger, at=101.0 + UNIDENTIFIED, cards=[A]) == Ledger()


def test_a_claim_that_is_prepared_again_leaves_its_cores_to_a_pod_that_is_unidentified() -> None:
    (mine,) = offered(A)
    again = replace(claim(prepared("r", mine)), pods=("next",), pod_uids=("n",))
    ledger = joined().before_replacing(again, [], 1.0).with_claim(again)
    assert list(ledger.orphans) == ["team/later"]
    identified = replace(again, pods=("train", "later"))
    assert joined().before_replacing(identified, [], 1.0).orphans == {}
    still = replace(again, unidentified=("later",))
    assert joined().before_replacing(still, [], 1.0).orphans == {}


UID = "0b1c6a4e-52f5-4a4e-9d5e-3d4f4b5c6d01"
STILL = (
    "Pod team/train (not listed by the kubelet, but its containers still run) still holds its cores"
)


def noted(ledger: Ledger, *held: Assignment, at: float, running: Iterable[str] = (UID,)) -> Ledger:
    """As `answered`; the kubelet has noted `UID` for U0, and these Pods live."""
    pods = {DeviceName(NPU, "U0"): frozenset({UID})}
    return ledger.with_answer(
        held, at, cards=[A], resources=[NPU], pods=pods, cgroups=dict.fromkeys(running, True)
    )


def outlived() -> Ledger:
    """A Pod had U0, is no longer listed, and lives."""
    ledger = Ledger()
    for at, held in ((1.0, [pod("U0")]), (5.0, []), (5.0 + HOLDER_ENDS, [])):
        ledger = noted(ledger, *held, at=at)
    return ledger


def test_a_pod_that_ends_before_it_is_listed_frees_its_cores() -> None:
    """A kubelet 1.37 lists a Pod no more a second after its Allocate if it was deleted by then."""
    ledger = Ledger().with_grant(NPU, offered(A), 100.0)
    for at in (101.0, 102.0, 103.0):
        ledger = noted(ledger, at=at)
        assert all(against(ledger, A, cores=1).values())
    ledger = noted(ledger, at=104.0, running=())
    assert all(against(ledger, A, cores=1).values())
    assert noted(ledger, at=104.0 + SETTLED, running=()) == Ledger()


def test_the_pod_before_says_nothing_of_one_that_starts() -> None:
    """The kubelet's notes still have it just after the grant."""
    ledger = noted(Ledger().with_grant(NPU, offered(A), 100.0), at=100.5)
    for at in (104.0, 106.0, 108.0):
        ledger = noted(ledger, at=at, running=())
    assert all(against(ledger, A, cores=1).values())


def test_a_pod_that_was_deleted_by_force_has_time_to_end() -> None:
    """Its device is not unhealthy meanwhile: the kubelet would fail the next Pod."""
    ledger = noted(noted(Ledger(), pod("U0"), at=1.0), at=5.0)
    for at in (7.0, 5.0 + HOLDER_ENDS - 0.1):
        ledger = noted(ledger, at=at)
        assert ledger.pending_release
        assert against(ledger, A) == {"U0": None}
        assert set(against(ledger, A, cores=1).values()) != {None}
    assert noted(ledger, at=at, running=()) == Ledger()
    assert noted(ledger, pod("U0"), at=at).allocations[DeviceName(NPU, "U0")].first_absent is None


def test_a_pod_that_is_no_longer_listed_and_lives_keeps_its_cores() -> None:
    ledger = outlived()
    assert ledger.allocations == {}
    assert ledger.pending_release
    assert against(ledger, A) == {"U0": STILL}
    for at in (16.0, 100.0):
        ledger = noted(ledger, at=at)
        assert against(ledger, A) == {"U0": STILL}
    ledger = noted(ledger, at=101.0, running=())
    assert ledger == Ledger()


def test_of_whom_it_matters_whether_they_live() -> None:
    ledger = noted(Ledger(), pod("U0"), at=1.0)
    now = {DeviceName(NPU, "U0"): frozenset({"another"})}
    assert ledger.orphan_candidates([DeviceName(NPU, "U0")], now) == frozenset()
    assert ledger.orphan_candidates([], {}) == {UID}
    assert ledger.orphan_candidates([], now) == {UID, "another"}
    assert outlived().orphan_candidates([DeviceName(NPU, "U0")], {}) == {UID}


def test_the_pods_before_are_known_although_the_kubelet_has_noted_the_next_one() -> None:
    ledger = noted(Ledger(), pod("U0"), at=1.0)
    for at, held in ((2.0, [pod("U0")]), (5.0, []), (5.0 + HOLDER_ENDS, [])):
        ledger = ledger.with_answer(held, at, cards=[A], resources=[NPU], cgroups={UID: True})
    assert against(ledger, A) == {"U0": STILL}


def test_orphans_are_kept_over_restarts_until_an_answer_says_otherwise() -> None:
    ledger = Ledger().with_predecessor(outlived(), 50.0)
    assert against(ledger, A) == {"U0": STILL}
    assert against(noted(ledger, at=49.0, running=()), A) == {"U0": STILL}
    assert against(noted(ledger, at=51.0, running=()), A) == {"U0": None}


@pytest.mark.parametrize("ledger", [Ledger(), Ledger().with_unreadable_record(0.0)])
def test_without_its_record_the_pods_that_the_kubelet_has_noted_count(ledger: Ledger) -> None:
    """One that was deleted by force is in no list; its card is known in all shapes."""
    pods = {DeviceName(NPU, "U0"): frozenset({UID})}
    for at in (1.0, 3.0, 1.0 + HOLDER_ENDS):
        ledger = noted(ledger, at=at, running=ledger.orphan_candidates([], pods))
        assert None not in against(ledger, A, cores=1).values()
        assert set(ledger.orphans) == (set() if at < 1.0 + HOLDER_ENDS else {UID})
    assert not ledger.unreadable
    assert against(ledger, B) == {"U1": None}
    assert noted(ledger, at=20.0) == ledger
    assert noted(ledger, at=21.0, running=()) == Ledger()


def test_a_note_counts_for_a_pod_on_the_node_and_a_device_of_these_cards() -> None:
    """The Pod is listed for its main container's device, and not for its init container's."""
    pods = {
        DeviceName(NPU, "U0"): frozenset({UID}),
        DeviceName(NPU, "U1"): frozenset({UID, "gone"}),
        DeviceName("other/gpu", "G0"): frozenset({"other"}),
    }
    assert Ledger().orphan_candidates([DeviceName(NPU, "U0")], pods) == {UID, "gone", "other"}
    ledger = Ledger()
    for at in (1.0, 3.0, 3.0 + UNSEEN):
        ledger = ledger.with_answer(
            [pod("U0")],
            at,
            cards=[A, B],
            resources=[NPU],
            pods=pods,
            cgroups={UID: True, "other": True},
        )
        assert ledger.allocations.keys() == {(NPU, "U0"), (NPU, "U1")}
        assert ledger.allocations[DeviceName(NPU, "U1")].holder == f"the Pod with the UID {UID}"
        assert ledger.orphans == {}
    assert not ledger.pending_release


def waiting(ledger: Ledger, at: float, *, cgroup: bool = True, noted: bool = True) -> Ledger:
    """After an answer without the Pod `UID`, which waits for a volume; it was given U0."""
    pods = {DeviceName(NPU, "U0"): frozenset({UID})} if noted else {}
    cgroups = {UID: False} if cgroup else {}
    return ledger.with_answer((), at, cards=[A], resources=[NPU], pods=pods, cgroups=cgroups)


def test_an_init_container_that_waits_for_a_volume_keeps_its_cores() -> None:
    """Its Pod's cgroup is there, without a process."""
    ledger = waiting(Ledger().with_grant(NPU, offered(A), 100.0), 102.0)
    assert ledger.pending_release  # it may be listed soon
    for at in (100.0 + UNSEEN, 100.0 + 10 * UNSEEN, 105.0 + 10 * UNSEEN):
        ledger = waiting(ledger, at)
        assert None not in against(ledger, A, cores=1).values()
    assert not ledger.pending_release
    # The kubelet removes the cgroup when the Pod has ended; its note stays until the next grant.
    ledger = waiting(ledger, 900.0, cgroup=False)
    assert None not in against(ledger, A, cores=1).values()
    assert waiting(ledger, 900.0 + SETTLED, cgroup=False) == Ledger()


def test_an_init_container_keeps_its_cores_over_a_restart_of_the_agent() -> None:
    """Without a cgroup, as long as after a grant: the record does not say when that was."""
    before = Ledger().with_offer({NPU: offered(A)}, [state(A)])
    restarted = Ledger().with_predecessor(before, 100.0)
    ledger = restarted
    for at in (101.0, 103.0, 100.0 + 10 * UNSEEN):
        ledger = waiting(ledger, at)
        assert None not in against(ledger, A, cores=1).values()
    ledger = restarted
    for at in (101.0, 103.0, 99.0 + UNSEEN):
        ledger = waiting(ledger, at, cgroup=False)
        assert None not in against(ledger, A, cores=1).values()
    for at in (100.0 + UNSEEN, 100.0 + UNSEEN + SETTLED):
        ledger = waiting(ledger, at, cgroup=False)
    assert not ledger.allocations
    ledger = waiting(restarted, 101.0, noted=False)
    assert not waiting(ledger, 101.0 + SETTLED, noted=False).allocations


def test_the_cgroup_of_a_pod_that_has_ended_keeps_its_cores() -> None:
    """Its volumes are being unmounted; no container shows as their holder."""
    ledger = noted(Ledger(), pod("U0"), at=1.0)
    for at in (5.0, 7.0, 20.0):
        ledger = waiting(ledger, at)
        assert None not in against(ledger, A, cores=1).values()
        assert ledger.usages([state(A)]) == ()
    ledger = waiting(ledger, 30.0, cgroup=False)
    assert waiting(ledger, 30.0 + SETTLED, cgroup=False) == Ledger()


def test_the_cores_of_an_orphan_stay_held_while_its_cgroup_and_its_note_are_there() -> None:
    """It may be an init container's Pod, whose sandbox is made again."""
    ledger = waiting(outlived(), 40.0)
    assert ledger.orphans == {}
    assert None not in against(ledger, A, cores=1).values()


def test_a_pod_with_a_device_of_no_card_blocks_all_until_the_card_is_known() -> None:
    ledger, by = Ledger(), f"the Pod with the UID {UID}"
    pods = {DeviceName(NPU, "U0"): frozenset({UID})}
    for at in (1.0, 3.0, 2.0 + HOLDER_ENDS):
        ledger = ledger.with_answer(
            (), at, cards=[B], resources=[NPU], pods=pods, cgroups={UID: True}
        )
        assert against(ledger, B) == {
            "U1": f"{by} holds U0 of beta.furiosa.ai/npu, and no card here has that ID"
        }
    ledger = ledger.with_answer((), 20.0, cards=[A, B], resources=[NPU], cgroups={UID: True})
    assert against(ledger, A, B) == {
        "U0": f"{by} (not listed by the kubelet, but its containers still run) still holds its "
        "cores",
        "U1": None,
    }


def test_pods_of_the_kubelets_checkpoint_are_added_to_known_allocations() -> None:
    ledger = noted(Ledger(), pod("U0"), at=1.0)
    assert ledger.with_pods({DeviceName(NPU, "U0"): frozenset({UID})}) == ledger
    assert ledger.with_pods({DeviceName(NPU, "U1"): frozenset({UID})}) == ledger
    more = ledger.with_pods({DeviceName(NPU, "U0"): frozenset({"next"})})
    assert more.has_pods_beyond(ledger)
    assert not ledger.has_pods_beyond(more)
    two = more.allocations[DeviceName(NPU, "U0")]
    assert two.pod_uids == {UID, "next"}
