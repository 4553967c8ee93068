"""Who used what: accounts that add up to their card, whatever its holders do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.accounting import LINGER, UNHELD, Account, Accounts, Holder, Subject
from npu_agent.core.hardware import CoreRange, CoreReading, Reading, Sensor, SensorKind, Snapshot
from npu_agent.core.ledger import Assignment, Usage
from tests.outputs.prometheus.helpers import card

CARD = card(uuid="U0")
ALL = CARD.card.all_cores
LONGEST = 15.0
A, B = Holder("ml", "a", "uid-a", "claim"), Holder("ml", "b", "uid-b")


def usage(holder: Holder, cores: CoreRange = ALL) -> Usage:
    names = Assignment(holder.namespace, holder.pod, "main", "r", "d", holder.claim)
    return Usage(CARD.id, cores, names, holder.uid)


def snapshot(at: float, load: float | None = 0.0, watts: float | None = 80.0) -> Snapshot:
    """The card as it was read then, with all cores alike."""
    power = () if watts is None else (Sensor(SensorKind.POWER, "rms", round(watts * 1e6)),)
    cores = tuple(CoreReading(core=core, utilization=load) for core in ALL)
    read = replace(CARD, reading=Reading(at=at, sensors=power, cores=cores))
    return Snapshot(cards=(read,), complete=True)


class Books:
    """Accounts from time 0, when the card was read first, with these holders until they change."""

    def __init__(self, *held: Usage) -> None:
        self.accounts, self.held = Accounts(), held
        self.read(0.0)

    def read(self, at: float, load: float | None = 0.0, watts: float | None = 80.0) -> None:
        self.snapshot = snapshot(at, load, watts)
        self.follow(at, *self.held)

    def follow(self, at: float, *held: Usage) -> None:
        self.held = held
        self.accounts.follow(self.snapshot, held, at, LONGEST)

    def of(self, holder: Holder) -> Account:
        return self.accounts.accounts[Subject("rngd", "npu0", holder)]

    def sums(self) -> tuple[float, ...]:
        every = self.accounts.accounts.values()
        return (
            sum(one.reserved for one in every),
            sum(one.busy or 0 for one in every),
            sum(one.joules or 0 for one in every),
        )


def test_a_holder_of_a_whole_card_has_all_that_it_used() -> None:
    books = Books(usage(A))
    books.read(10.0, load=25.0)
    books.read(20.0, load=0.0)
    assert books.of(A) == Account(since=0.0, reserved=160, busy=20, idle=80, joules=1600)


def test_cores_and_energy_go_to_those_that_hold_the_cores_and_the_rest_to_no_holder() -> None:
    books = Books(usage(A, CoreRange(0, 1)), usage(B, CoreRange(4, 4)))
    books.read(10.0, load=50.0)
    found = {h: (books.of(h).reserved, books.of(h).busy, books.of(h).joules) for h in (A, B)}
    assert found == {A: (20, 10, 200), B: (10, 5, 100)}
    assert books.sums() == (80, 40, 800)


def test_a_core_that_two_pods_share_is_divided() -> None:
    books = Books(usage(A), usage(B))
    books.read(10.0, load=50.0)
    assert books.of(A) == replace(books.of(B))
    assert books.sums() == (80, 40, 800)


def test_work_between_two_readings_is_that_of_the_pod_that_held_the_core() -> None:
    books = Books()
    books.follow(6.0, usage(A))
    books.read(10.0, load=30.0)  # 3 s of 10: in the 4 s of the Pod
    assert (books.of(A).busy, books.of(UNHELD).busy) == (24, 0)
    books.follow(12.0)
    books.read(20.0, load=50.0)  # 5 s of 10: more than the Pod had
    assert (books.of(A).busy, books.of(UNHELD).busy) == (24 + 16, 24)


def test_what_no_reading_shows_is_unknown_and_not_0() -> None:
    books = Books(usage(A))
    books.read(10.0, load=None, watts=None)
    assert books.of(A) == Account(since=0.0, reserved=80)
    books.read(10.0 + LONGEST + 1, load=100.0)  # it hung: who knows what it did
    assert (books.of(A).reserved, books.of(A).busy) == (80 + 8 * 16, None)
    books.read(30.0, load=100.0)
    assert (books.of(A).busy, books.of(A).joules) == (32, 320)


def test_an_account_stays_for_a_last_scrape_and_ends() -> None:
    books = Books(usage(A))
    books.follow(10.0)
    books.read(12.0, load=50.0)
    books.follow(10.0 + LINGER)
    assert books.of(A).busy == 48, "its last seconds are booked after its end"
    books.follow(10.1 + LINGER)
    assert [subject.holder for subject in books.accounts.accounts] == [UNHELD]


def test_a_pod_that_returns_goes_on_and_another_of_its_name_does_not() -> None:
    books = Books(usage(A))
    books.follow(10.0)
    books.follow(20.0, usage(A))
    books.follow(30.0, usage(A._replace(uid="uid-2")))
    assert (books.of(A).reserved, books.of(A).ended) == (160, 30.0)
    assert books.of(A._replace(uid="uid-2")).since == 30.0


def test_without_cards_nothing_is_counted() -> None:
    """Another agent owns the node, or the card is gone."""
    books = Books(usage(A))
    books.accounts.follow(Snapshot(), (usage(A),), 10.0, LONGEST)
    books.accounts.follow(Snapshot(), (usage(A),), 50.0, LONGEST)
    books.read(60.0, load=100.0)
    assert books.of(A) == Account(since=0.0, reserved=80)


Step = tuple[float, float | None, list[tuple[Holder, int, int]]]
STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.one_of(st.none(), st.floats(0.0, 100.0)),
        st.lists(
            st.tuples(st.sampled_from((A, B)), st.integers(0, 7), st.integers(0, 7)), max_size=4
        ),
    ),
    max_size=30,
)


@given(STEPS)
def test_accounts_add_up_to_the_card_and_never_fall(steps: list[Step]) -> None:
    """A step is a time, a new reading if it has a load, and who holds which cores from then on."""
    books, now, read_at = Books(), 0.0, 0.0
    known = worked = joules = 0.0
    before: dict[Subject, Account] = {}
    for passed, load, held in steps:
        now += passed
        if load is not None and now > read_at:
            books.snapshot = snapshot(now, load)
            if now - read_at <= LONGEST:
                worked += 8 * (now - read_at) * load / 100
                joules += (now - read_at) * 80
            read_at = now
        books.follow(
            now, *(usage(h, CoreRange(min(one, two), max(one, two))) for h, one, two in held)
        )
        known = 8 * now
        after = books.accounts.accounts
        for subject, account in after.items():
            assert (account.busy or 0) <= account.reserved + 1e-6
            was = before.get(subject, Account(now))
            assert account.reserved >= was.reserved
            assert (account.busy or 0) >= (was.busy or 0)
            assert (account.joules or 0) >= (was.joules or 0)
        before = {subject: replace(account) for subject, account in after.items()}
        if now <= LINGER:
            assert books.sums() == pytest.approx((known, worked, joules), abs=1e-6)
