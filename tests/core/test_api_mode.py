"""Where cards are offered: no card by both APIs, no core twice, whatever happens in whatever order.

A state machine plays a node: the config, the kubelet with its late lists, the API server with its
late slices, a scheduler with an old view, and an agent that is killed at any moment. What the agent
does with `api_mode` is written down here as its outputs do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_agent.core.api_mode import (
    ApiMode,
    CardUse,
    WantedApi,
    WantedApis,
    api_mode,
    sends_elsewhere,
)

CARDS = range(3)
ENDS = (WantedApi.PLUGIN, WantedApi.DRA)


@pytest.mark.parametrize(
    ("known", "where"),
    [
        (CardUse(wanted=WantedApi.PLUGIN), ApiMode.PLUGIN),
        (CardUse(wanted=WantedApi.PLUGIN, by_container=True, listed=True), ApiMode.PLUGIN),
        (CardUse(wanted=WantedApi.PLUGIN, published=True), ApiMode.NOWHERE),
        (
            CardUse(wanted=WantedApi.PLUGIN, published=True, by_claim=True),
            ApiMode.DRAINING_FROM_DRA,
        ),
        (CardUse(wanted=WantedApi.PLUGIN, by_claim=True), ApiMode.NOWHERE),
        (CardUse(wanted=WantedApi.DRA), ApiMode.DRA),
        (CardUse(wanted=WantedApi.DRA, by_claim=True, published=True), ApiMode.DRA),
        (CardUse(wanted=WantedApi.DRA, listed=True), ApiMode.NOWHERE),
        (
            CardUse(wanted=WantedApi.DRA, listed=True, by_container=True),
            ApiMode.DRAINING_FROM_PLUGIN,
        ),
        (CardUse(wanted=WantedApi.DRA, by_container=True), ApiMode.DRAINING_FROM_PLUGIN),
        # Somebody came to know late that a container holds it: its taint says so.
        (CardUse(wanted=WantedApi.DRA, published=True, by_container=True), ApiMode.DRA),
        (CardUse(wanted=WantedApi.STAY), ApiMode.NOWHERE),
        (CardUse(wanted=WantedApi.STAY, listed=True), ApiMode.PLUGIN),
        (CardUse(wanted=WantedApi.STAY, published=True), ApiMode.DRA),
        (CardUse(wanted=WantedApi.NEITHER, published=True, by_claim=True), ApiMode.NOWHERE),
    ],
)
def test_where_a_card_is_offered(known: CardUse, where: ApiMode) -> None:
    assert api_mode(known) is where


def test_only_from_one_end_to_the_other_is_a_turn() -> None:
    def wishes(wish: WantedApi, disabled: str = "") -> WantedApis:
        return WantedApis(families={"anvil": wish}, disabled=frozenset({disabled}))

    assert sends_elsewhere(wishes(WantedApi.PLUGIN), wishes(WantedApi.DRA))
    assert sends_elsewhere(WantedApis(), wishes(WantedApi.DRA))
    assert not sends_elsewhere(WantedApis(), wishes(WantedApi.PLUGIN))
    assert not sends_elsewhere(wishes(WantedApi.STAY), wishes(WantedApi.DRA))
    assert not sends_elsewhere(wishes(WantedApi.DRA), wishes(WantedApi.DRA, "npu0"))


@dataclass
class Agent:
    """What an agent knows; `noted` is on disk."""

    listed: set[int] = field(default_factory=set)
    noted: set[int] = field(default_factory=set)
    list: dict[int, bool] = field(default_factory=dict)
    """What it lists: card, and whether it is healthy."""
    pool: dict[int, bool] = field(default_factory=dict)
    """What is to be in the slices: card, and whether it has no taint."""


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()
        self.wish = WantedApi.PLUGIN
        self.away: set[int] = set()
        """Disabled cards."""
        self.lists: list[dict[int, bool]] = [{}]
        """What was sent to the kubelet; it knows the last one or, for a while, one before."""
        self.slices: dict[int, bool] = {}
        """What the API server has."""
        self.views: list[dict[int, bool]] = [{}]
        """The slices as a scheduler may still see them."""
        self.containers: set[int] = set()
        self.claims: set[int] = set()
        self.recovered: set[int] = set()
        """What the agent takes for held since its start, as an agent before it has listed it."""
        self.decide()

    # The agent

    def where(self, card: int) -> ApiMode:
        wish = WantedApi.NEITHER if card in self.away else self.wish
        return api_mode(
            CardUse(
                wanted=wish,
                listed=card in self.agent.listed,
                published=card in self.agent.noted,
                by_container=card in self.containers | self.recovered,
                by_claim=card in self.claims,
            )
        )

    @rule()
    def decide(self) -> None:
        """Both outputs decide, and note what they are about to do in the same moment."""
        agent = self.agent
        agent.list = {
            card: self.where(card) is ApiMode.PLUGIN for card in CARDS if self.where(card).listed
        }
        agent.listed |= agent.list.keys()
        agent.pool = {
            card: self.where(card) is ApiMode.DRA and card not in self.containers
            for card in CARDS
            if self.where(card).published
        }
        agent.noted |= agent.pool.keys()

    @rule(
        wish=st.sampled_from((*ENDS, *ENDS, WantedApi.STAY)), away=st.sets(st.sampled_from(CARDS))
    )
    def configured(self, wish: WantedApi, away: set[int]) -> None:
        self.wish, self.away = wish, away

    @rule()
    def sends_its_list(self) -> None:
        self.lists.append(dict(self.agent.list))

    @rule()
    def the_kubelet_takes_the_list(self) -> None:
        self.lists = self.lists[-1:]

    @rule()
    def the_kubelet_is_asked(self) -> None:
        """What it offers: nothing that is in any list which it may still have to take."""
        offered = {card for each in self.lists for card, healthy in each.items() if healthy}
        self.agent.listed -= CARDS_SET - offered - self.agent.list.keys()

    @rule(answered=st.booleans(), lost=st.booleans())
    def writes_slices(self, answered: bool, lost: bool) -> None:
        """The API server may be away, and its answer may be lost."""
        if not lost:
            self.slices = dict(self.agent.pool)
            self.views.append(dict(self.slices))
        if not lost and answered:
            self.agent.noted -= CARDS_SET - self.slices.keys() - self.agent.pool.keys()

    @rule()
    def the_scheduler_sees_the_slices(self) -> None:
        self.views = [dict(self.slices)]

    @rule()
    def the_kubelet_deletes_the_slices(self) -> None:
        self.slices = {}

    @rule()
    def killed_and_started(self) -> None:
        """What it has noted is on disk; the kubelet sees the end of its stream."""
        self.recovered = set(self.agent.list)
        self.agent = Agent(noted=set(self.agent.noted))
        self.lists = [{}]

    @rule()
    def pod_resources_answer(self) -> None:
        self.recovered.clear()

    # Pods

    @rule(card=st.sampled_from(CARDS))
    def allocate(self, card: int) -> None:
        """The kubelet gives what it has listed; the agent answers by what it lists now."""
        seen = any(each.get(card) for each in self.lists) and card not in self.containers
        refused = not self.agent.list.get(card) or card in self.claims | self.agent.noted
        if seen and not refused:
            self.containers.add(card)

    @rule(card=st.sampled_from(CARDS))
    def prepare(self, card: int) -> None:
        """The scheduler has allocated by one of the slices that it has seen."""
        seen = any(each.get(card) for each in self.views) and card not in self.claims
        refused = card in self.containers | self.recovered | self.agent.listed
        if seen and not refused:
            self.claims.add(card)

    @precondition(lambda self: self.containers)
    @rule(data=st.data())
    def pod_ends(self, data: st.DataObject) -> None:
        self.containers.remove(data.draw(st.sampled_from(sorted(self.containers))))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def claim_ends(self, data: st.DataObject) -> None:
        self.claims.remove(data.draw(st.sampled_from(sorted(self.claims))))

    # What has to hold

    @invariant()
    def no_card_is_offered_by_both(self) -> None:
        offered = {card for each in self.lists for card, healthy in each.items() if healthy}
        assert offered.isdisjoint(self.slices), (self.lists, self.slices)

    @invariant()
    def no_card_is_held_twice(self) -> None:
        assert self.containers.isdisjoint(self.claims)

    @invariant()
    def all_that_may_be_in_a_slice_is_noted(self) -> None:
        assert self.slices.keys() <= self.agent.noted

    def settle(self) -> None:
        for _ in range(3):
            self.decide()
            self.sends_its_list()
            self.the_kubelet_takes_the_list()
            self.the_kubelet_is_asked()
            self.writes_slices(answered=True, lost=False)

    def teardown(self) -> None:
        """Whatever has happened: when nothing holds a card any more, all are where they belong."""
        self.pod_resources_answer()
        for wish in ENDS:
            self.wish, self.away = wish, set()
            self.settle()
            self.no_card_is_offered_by_both()
            held = {WantedApi.PLUGIN: self.claims, WantedApi.DRA: self.containers}[wish]
            there = {WantedApi.PLUGIN: self.lists[-1], WantedApi.DRA: self.slices}[wish]
            assert CARDS_SET - held == {card for card, free in there.items() if free} - held
        self.containers.clear()
        self.claims.clear()
        self.settle()
        assert self.slices == dict.fromkeys(CARDS, True)
        assert self.lists == [{}]


CARDS_SET = set(CARDS)
TestPlaces: Any = Machine.TestCase
TestPlaces.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
