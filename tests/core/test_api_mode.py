"""Where a card is offered, case by case; `test_exclusive` plays moves between the APIs."""

from __future__ import annotations

import pytest

from npu_agent.core.api_mode import (
    ApiMode,
    CardUse,
    WantedApi,
    api_mode,
)


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
