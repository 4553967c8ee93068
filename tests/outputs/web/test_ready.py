from dataclasses import replace
from typing import Any

import msgspec
import pytest

from npu_agent.outputs.deviceplugin.session import Phase
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import RESOURCE, Scene


def scene(phase: Phase, reason: str = "", registrations: int = 0, **more: Any) -> Scene:
    more.setdefault("cards", (state(),))
    return Scene(phase=phase, reason=reason, registrations=registrations, **more)


def test_ready_when_the_kubelet_holds_the_resource() -> None:
    assert scene(Phase.REGISTERED).unready() == ()


def test_an_instance_that_stands_by_is_ready() -> None:
    """A rolling update with maxSurge ends the old one only when the new one is ready."""
    assert scene(Phase.STANDBY, "served by another").unready() == ()


@pytest.mark.parametrize("phase", [Phase.NO_CARDS, Phase.REGISTERING])
def test_a_node_without_cards_is_ready(phase: Phase) -> None:
    assert scene(phase, cards=()).unready() == ()


def test_a_node_whose_cards_are_all_disabled_is_ready() -> None:
    assert scene(Phase.NO_CARDS, disabled=frozenset({"npu0"})).unready() == ()


@pytest.mark.parametrize("phase", [Phase.NO_CARDS, Phase.REGISTERING])
def test_not_ready_before_the_cards_were_looked_at(phase: Phase) -> None:
    found = scene(phase, cards=(), complete=False).unready()
    assert found == (f"{RESOURCE}: registering: still looking for cards",)


def test_not_ready_before_the_session_knows_of_the_cards() -> None:
    """A session is told of them a moment later: that must not be taken for a node without any."""
    assert scene(Phase.NO_CARDS).unready() == (f"{RESOURCE}: registering",)


def test_not_ready_until_it_is_registered() -> None:
    found = scene(Phase.REGISTERING, "kubelet.sock is missing").unready()
    assert found == (f"{RESOURCE}: registering: kubelet.sock is missing",)


def test_not_ready_while_it_registers_again() -> None:
    found = scene(Phase.REGISTERING, "its stream ended", 3).unready()
    assert found == (f"{RESOURCE}: registering again: its stream ended",)


@pytest.mark.parametrize("phase", [Phase.BLOCKED, Phase.ENDED])
def test_not_ready_when_it_cannot_serve(phase: Phase) -> None:
    found = scene(phase, "mount it").unready()
    assert found == (f"{RESOURCE}: {phase.value}: mount it",)


def test_a_sick_card_is_no_reason() -> None:
    """Its device is told as unhealthy, which is the agent's job done."""
    from npu_agent.core.hardware import State

    assert scene(Phase.REGISTERED, cards=(state(health=State.UNHEALTHY),)).unready() == ()


def test_not_ready_with_a_refused_config_and_ready_with_keys_that_wait() -> None:
    good = scene(Phase.REGISTERED)
    waiting = msgspec.structs.replace(good.config, waiting=("resourceName",))
    assert replace(good, config=waiting).unready() == ()
    refused = msgspec.structs.replace(good.config, error="config.yaml:3:1: unknown key")
    assert replace(good, config=refused).unready() == ("config: config.yaml:3:1: unknown key",)
