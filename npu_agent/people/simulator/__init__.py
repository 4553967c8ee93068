"""A driver tree that lives and can be made to fail: the agent reads it as it reads a real host.

`make` writes it, `simulate` keeps it alive, `apply_fault` breaks and repairs its cards.
"""

from npu_agent.people.simulator.cards import (
    CardSpec,
    default_cards,
    parse_cards,
    with_driver,
)
from npu_agent.people.simulator.faults import FAULTS, SimulatedCard
from npu_agent.people.simulator.tree import (
    SimulatorError,
    apply_fault,
    cards,
    make,
    show,
    simulate,
)

__all__ = [
    "FAULTS",
    "CardSpec",
    "SimulatedCard",
    "SimulatorError",
    "apply_fault",
    "cards",
    "default_cards",
    "make",
    "parse_cards",
    "show",
    "simulate",
    "with_driver",
]
