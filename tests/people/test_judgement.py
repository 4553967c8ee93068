"""What `info`, `doctor` and `cdi generate` say of each fault, next to what the agent says."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.config import MetricsConfig, default_config
from npu_agent.core.hardware import Snapshot
from npu_agent.core.health import Policy
from npu_agent.core.kinds import Problem
from npu_agent.core.problems.cards import problems
from npu_agent.core.timeline import Timeline
from npu_agent.feed import Feed, changes_of
from npu_agent.inventory.card import ProbeSettings
from npu_agent.inventory.inventory import Inventory
from npu_agent.people import simulator
from npu_agent.people.cards import as_agent, read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.cdi import host_spec
from npu_agent.people.commands.doctor import examine
from npu_agent.people.doctor.check import Check, Context, State
from npu_agent.people.simulator.faults import FAULTS
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.sysfs import Furiosa
from npu_agent.wording import ENGLISH
from tests.inventory.helpers import tree
from tests.processes import ran, started

UNHEALTHY = {
    "dead": "the driver reports the card dead",
    "no-node": "its device nodes are missing",
    "hang": "it does not answer",
    "unreadable": "the driver returned an invalid value",
    "garbage": "the driver returned an invalid value",
}
LASTING = {
    "hot": "CardHot",
    "slow": "CardSlow",
    "narrow": "LinkSlow",
    "slow-link": "LinkSlow",
    "twin": "SameUUID",
}
BY_COMPARISON = {
    "errors": "ErrorsRising",
    "bus-errors": "ErrorsRising",
    "gone": "CardMissing",
    "swap": "",
    "reset": "",
}
"""What one reading does not show: the agent compares it with the one before."""
LOADS = {"busy", "busy-one", "idle", "ok", "back"}
FLAPPING = {"flap"}
"""Dead or not, by the second: six changes make it a problem."""


def test_each_fault_is_here() -> None:
    assert FAULTS.keys() == {*UNHEALTHY, *LASTING, *BY_COMPARISON, *LOADS, *FLAPPING}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "host", "rngd=4")


def broken(root: Path, fault: str) -> None:
    for card in ("npu1", "npu2") if fault == "twin" else ("npu1",):
        simulator.apply_fault(root, card, fault)


async def of_the_agent(root: Path, fault: str, *kinds: str) -> tuple[Problem, ...]:
    """The problems of cards of a running agent, once they are of these kinds.

    Not the first ones: a card that is taken out loses its files one after another.
    """
    policy = Policy(slow_after=0.01)
    pace = ProbeSettings(interval=0.2, health_interval=0.05, telemetry_interval=0.1, policy=policy)
    inventory = Inventory(Furiosa(root, simulated=True), Feed(pace))
    running = asyncio.create_task(inventory.run())
    try:
        async with asyncio.timeout(60):
            before = await inventory.snapshots.until(lambda snapshot: snapshot.complete)
            broken(root, fault)
            async for _ in changes_of(inventory.snapshots, inventory.trends):
                now = inventory.snapshots.value
                here = {card.id for card in now.cards}
                left = [card for card in before.cards if card.id not in here]
                state = replace(
                    as_agent(now),
                    trends=inventory.trends.value,
                    timeline=Timeline().left(left, now.cards, 0.0),
                )
                state = replace(state, monotonic=0.0)
                found = tuple(problems(state))
                if [problem.kind for problem in found] == [*kinds]:
                    return found
    finally:
        running.cancel()
    raise AssertionError


async def of_doctor(root: Path) -> dict[str, Check]:
    """What it finds on a host without Kubernetes; cards are one line in these tests."""
    config = default_config(SPEC)
    metrics = replace(MetricsConfig(), listen="127.0.0.1:0", probes="127.0.0.1:0")
    config = replace(config, metrics=metrics, plugin_dir=str(root / "none/device-plugins"))
    context = Context(
        config=config,
        host_root=root,
        vendor=Furiosa(root, simulated=True),
        node_name=None,
        in_pod=False,
        uid=0,
        hostname="a-host",
    )
    return {check.name: check for check in await examine(context)}


def offered(snapshot: Snapshot) -> set[str]:
    names = {name.partition("=")[2] for name in host_spec(snapshot).devices}
    return {"npu0", "npu1", "npu2", "npu3"} & names


@pytest.mark.parametrize("fault", UNHEALTHY)
async def test_a_card_that_the_agent_fences_is_offered_by_none(root: Path, fault: str) -> None:
    (problem,) = await of_the_agent(root, fault, "CardUnhealthy")
    assert UNHEALTHY[fault] in ENGLISH.text(problem)
    snapshot = await read_once(Furiosa(root, simulated=True))
    assert offered(snapshot) == {"npu0", "npu2", "npu3"}
    doctor = await of_doctor(root)
    if not any(state.card.name == "npu1" for state in snapshot.cards):
        # Its identity cannot be read either; the agent knew it.
        assert [skipped.unread for skipped in snapshot.skipped] == [True]
        assert [check.state for name, check in doctor.items() if name.startswith("odd")] == [
            State.WRONG
        ]
        return
    row = view.cards_as_json(snapshot)[1]
    assert row["health"] == "unhealthy"
    assert doctor["card"].detail == ENGLISH.text(problem)
    assert doctor["card"].state is State.WRONG


@pytest.mark.parametrize("fault", LASTING)
async def test_what_lasts_on_a_card_is_said_by_all_and_takes_it_from_none(
    root: Path, fault: str
) -> None:
    (problem,) = await of_the_agent(root, fault, LASTING[fault])
    snapshot = await read_once(Furiosa(root, simulated=True))
    doctor = await of_doctor(root)
    assert (doctor["card"].state, doctor["card"].detail) == (State.WRONG, ENGLISH.text(problem))
    rows = {row["name"]: row for row in view.cards_as_json(snapshot)}
    marked = {name for name, row in rows.items() if row["warnings"]}
    assert marked == {card.name for card in problem.cards}
    assert rows["npu1"]["health"] == "healthy"
    assert offered(snapshot) == {"npu0", "npu1", "npu2", "npu3"}


@pytest.mark.parametrize("fault", BY_COMPARISON)
async def test_what_only_a_comparison_shows_is_for_the_agent(root: Path, fault: str) -> None:
    kinds = [BY_COMPARISON[fault]] if BY_COMPARISON[fault] else []
    await of_the_agent(root, fault, *kinds)
    snapshot = await read_once(Furiosa(root, simulated=True))
    assert "card" not in await of_doctor(root) or fault == "bus-errors"
    assert not any(row["warnings"] for row in view.cards_as_json(snapshot))
    assert ("npu1" in offered(snapshot)) is (fault != "gone")


@pytest.mark.parametrize("fault", sorted(LOADS))
async def test_load_is_no_fault(root: Path, fault: str) -> None:
    broken(root, fault)
    doctor = await of_doctor(root)
    assert "card" not in doctor
    assert doctor["Kubernetes"].state is State.NOTE
    assert not [check for check in doctor.values() if check.state is State.WRONG]


@pytest.fixture
def limit(tmp_path: Path) -> str:
    """A config file whose limit idle cards are above."""
    file = tmp_path / "config.yaml"
    file.write_text("health: {maxTemperature: 35}\n", encoding="utf-8")
    return str(file)


def test_the_configs_limit_holds_for_verify_too(root: Path, limit: str) -> None:
    granted = {"NPU_DEVNAME": "npu1pe0-7", "FURIOSA_DEVICES": "npu:1:0-7"}
    _, out, _ = ran("verify", "--host-root", root, NPU_AGENT_CONFIG_FILE=limit, **granted)
    assert re.search("^wrong  npu1 health: unhealthy: it is too hot", out, re.MULTILINE), out


def test_the_configs_limit_holds_for_info_that_goes_on(root: Path, limit: str) -> None:
    words = ("info", "-w", "-o", "yaml", "--host-root", root)
    with started(*words, NPU_AGENT_CONFIG_FILE=limit) as process:
        process.printed("health: unhealthy")
