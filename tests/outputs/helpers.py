"""Who holds what, as the ledger finds it."""

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, Holding, Ledger

RESOURCE = "beta.furiosa.ai/npu"


def holdings(snapshot: Snapshot, *assignments: Assignment) -> tuple[Holding, ...]:
    """What the cards' holders hold once the kubelet has reported these assignments."""
    cards = [state.card for state in snapshot.cards]
    ledger = Ledger().answered(assignments, 1.0, cards=cards, resources={RESOURCE})
    return ledger.holdings(snapshot.cards)
