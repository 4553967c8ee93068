"""The tables for people; what they look like for whole hosts is in tests/inventory/golden."""

from dataclasses import replace

import pytest
from rich.table import Table

from npu_agent.core.hardware import (
    CoreReading,
    HealthState,
    Reading,
    Sensor,
    SensorKind,
    Snapshot,
)
from npu_agent.core.ledger import Assignment
from npu_agent.core.pool import devices_by_name
from npu_agent.people.commands import view
from tests.outputs.deviceplugin.helpers import state

CARD = state(id_="UUID-0")


def rows(table: Table) -> list[str]:
    """The rows as they are printed, without the padding."""
    return [
        " | ".join(cell.strip() for cell in line.strip("|").split("|"))
        for line in view.drawn(table).splitlines()
        if line.startswith("|")
    ]


def test_a_hot_card_is_not_just_healthy_and_wide_has_load_memory_and_errors() -> None:
    cores = tuple(
        CoreReading(core=core, utilization=30.0 + core, dram_used=2**29, dram_total=2**33)
        for core in range(2)
    )
    sensors = (Sensor(SensorKind.TEMPERATURE, "1", 101_000),)
    errors = (("axi_post_error", 3), ("device_error", 0))
    reading = Reading(at=0.0, sensors=sensors, cores=cores, errors=errors)
    seen = Snapshot((replace(CARD, reading=reading),))
    table = view.cards_table(seen, wide=True)
    head, row = rows(table)
    assert "PCI-BDF | PCI-DEV | Health | Load | Memory | Cores | Limit | Throttled | Errors" in head
    assert "healthy; npu0 is hot: above 90 °C | 30% | 1.0/16 GiB | " in row
    assert " | - | - | axi_post_error 3 | " in row
    (found,) = view.cards_as_json(seen)
    assert found["health"] == "healthy", "the key is a contract"
    assert found["warnings"] == ["npu0 is hot: above 90 °C"]
    assert (found["load"], found["memory"]) == (30.5, {"used": 2**30, "total": 2**34})
    assert found["errors"] == {"axi_post_error": 3, "device_error": 0}


def test_an_unknown_value_is_a_dash() -> None:
    unnamed = replace(CARD, card=replace(CARD.card, uuid="", driver_version=""))
    (_, row) = rows(view.cards_table(Snapshot((unnamed,)), wide=True))
    assert row == f"npu0 | FuriosaAI Warboy{' | -' * 4} | healthy | - | - | 2{' | -' * 8}"


def test_the_pods_that_hold_a_card() -> None:
    other = state("warboy", 1, id_="UUID-1")
    held = [
        Assignment("ai", "b", "main", "beta.furiosa.ai/npu", "UUID-0_cores_1"),
        Assignment("ai", "a", "main", "beta.furiosa.ai/npu", "UUID-0_cores_0"),
        Assignment("ai", "a", "side", "beta.furiosa.ai/npu", "UUID-0_cores_0"),
        Assignment("ai", "x", "main", "other.example/gpu", "GPU-0"),
        # As the second card is called by claims, but of another device plugin.
        Assignment("ai", "y", "main", "other.example/gpu", "npu-uuid-1"),
    ]
    assert "npu-uuid-1" in devices_by_name((CARD, other))
    table = view.cards_table(Snapshot((CARD, other)), held)
    assert [row.split(" | ")[-1] for row in rows(table)] == [
        "Pod",
        "ai/a (0), ai/b (1)",
        "-",
    ]
    table = view.cards_table(Snapshot((CARD, other)), held[-1:])
    assert [row.split(" | ")[-1] for row in rows(table)] == ["Pod", "-", "-"]


def test_the_pods_that_hold_parts_of_a_card() -> None:
    def claim(pod: str, device: str) -> Assignment:
        return Assignment("ai", pod, "main", "npu.furiosa.ai", device, f"{pod}-npu")

    held = [
        claim("a", "npu-r-cores-4-5"),
        claim("b", "npu-r-cores-0-3"),
        claim("d", "npu-s"),
        claim("gone", "npu-x-cores-0"),
    ]
    cards = (state("rngd", 0, id_="R"), state("rngd", 1, id_="S"))
    table = view.cards_table(Snapshot(cards), held)
    assert [row.split(" | ")[-1] for row in rows(table)] == [
        "Pod",
        "ai/b (0-3), ai/a (4-5)",
        "ai/d",
    ]


def test_a_drivers_text_is_shown_and_never_obeyed() -> None:
    reason = "[red]:smile: [link=x]"
    odd = state(health=HealthState.UNHEALTHY, reason=reason)
    shown = view.drawn(view.cards_table(Snapshot((odd,))), f"not served: {reason}")
    assert f"unhealthy: {reason}" in shown
    assert f"\nnot served: {reason}" in shown
    assert "\x1b" not in shown


def test_control_characters_of_whoever_answers_for_the_kubelet_are_not_shown() -> None:
    names = ("\x1b[2Ja", "b\x9b1m", "c\nd", "furiosa.ai/\x07rngd", "UUID-0")
    held = [Assignment(*names), Assignment(*names, "\x1b]0;e")]
    shown = view.drawn(view.allocations_table(Snapshot(()), held))
    assert "| ?[2Ja     | b?1m |" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_the_six_columns_of_the_vendors_tool_come_first_in_a_pipe_and_at_100_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    six = "NPU | Name | Temp. | Power | PCI-BDF | PCI-DEV"
    held = [Assignment("default", "train-0", "main", "furiosa.ai/warboy", "UUID-0")]
    for width, more in (
        (None, "Health | Load | Memory | Pod"),
        (140, "Health | Load | Memory | Pod"),
        (110, "Health | Load | Memory | Pod"),
        (100, "Health | Load | Memory"),
    ):
        monkeypatch.setattr(view, "terminal_width", lambda width=width: width)
        assert rows(view.cards_table(Snapshot((CARD,)), held))[0] == f"{six} | {more}"
    monkeypatch.setattr(view, "terminal_width", lambda: 80)
    head = rows(view.cards_table(Snapshot((CARD,)), held))[0]
    assert head == "NPU | Name | Temp. | Power | PCI-BDF | Load | Health"


def test_a_narrow_terminal_keeps_who_has_which_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "terminal_width", lambda: 60)
    held = [Assignment("default", "train", "main", "furiosa.ai/warboy", "UUID-0" * 6)]
    table = view.allocations_table(Snapshot((CARD,)), held)
    assert rows(table)[0] == "Namespace | Pod | Container | Card | Cores"


def test_a_table_that_goes_to_a_program_is_not_cut() -> None:
    long = state(health=HealthState.UNHEALTHY, reason="x" * 200)
    table = view.cards_table(Snapshot((long,)))
    assert rows(table)[1].endswith(f" | unhealthy: {'x' * 200} | - | -")


def test_a_terminal_has_a_line_for_each_held_card_and_unhealthy_ones_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view, "terminal_width", lambda: 200)
    unhealthy = state("rngd", 2, id_="C", health=HealthState.UNHEALTHY, reason="why")
    cards = (state("rngd", 0, id_="A"), state("rngd", 1, id_="B"), unhealthy)
    pods = ("llama-3-70b-instruct-fu-7d4f9c-qq2lp", "llama-3-70b-instruct-fu-7d4f9c-x8kzq")
    held = [Assignment("ml", pod, "main", "furiosa.ai/rngd", "A") for pod in pods]
    shown = rows(view.cards_table(Snapshot(cards), held))[1:]
    assert [row.split(" | ")[0].strip("| ") for row in shown] == ["npu2", "npu0", "npu1"]
    assert "ml/llama-3-70b…-7d4f9c-qq2lp +1" in shown[1]
    totals = view.totals(view.cards_as_json(Snapshot(cards), held))
    assert totals == "3 cards, 1 unhealthy, 1 in use"
