"""What Acme's driver shows of an Anvil."""

from __future__ import annotations

from npu_agent.people.simulator.cards import Broken, CardSpec
from npu_agent.people.simulator.picture import Picture, Special
from npu_agent.people.simulator.telemetry import CardTelemetry


def _entry(spec: CardSpec) -> str:
    return f"sys/class/anvil/anvil{spec.index}"


def picture(spec: CardSpec, state: CardTelemetry) -> Picture:
    """All that a healthy card shows."""
    nodes = (f"dev/anvil{spec.index}", *(f"dev/anvil{spec.index}c{core}" for core in range(2)))
    return {
        f"{_entry(spec)}/uuid": f"{spec.uuid}\n",
        f"{_entry(spec)}/version": f"{spec.driver_version}\n",
        f"{_entry(spec)}/alive": "1\n",
        f"{_entry(spec)}/temperature": f"{max(state.temperature) * 1e3:.0f}\n",
        **dict.fromkeys(nodes, Special.NODE),
    }


def directories(family: str) -> frozenset[str]:  # noqa: ARG001 (there is one)
    """Directories that are there without a card."""
    return frozenset({"sys/class/anvil"})


def broken(spec: CardSpec, state: CardTelemetry) -> dict[str, Broken]:  # noqa: ARG001
    """What each fault makes of its files; None takes one away."""
    alive = f"{_entry(spec)}/alive"
    temperature = f"{_entry(spec)}/temperature"
    return {
        "dead": {alive: "0\n"},
        "hang": {alive: Special.FIFO},
        "hot": {temperature: "100000\n"},
        "no-node": {f"dev/anvil{spec.index}c0": None},
        "garbage": {alive: b"\xff\xfe", temperature: "warm\n"},
        "unreadable": dict.fromkeys((alive, temperature), Special.DIRECTORY),
    }
