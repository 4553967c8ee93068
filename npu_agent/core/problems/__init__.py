"""Problems of node and agent as values: the one answer to "is all well?". Pure, and without prose.

`problems` wait for a person, the most harmful first; `unready` are those of them that keep the
agent from being ready; `notes` are out of the ordinary and no fault. The rules are functions from
`AgentState` to `Problem`: those of cards in `cards`, those of the agent in `agent`, and `notes`.
Page, status.json, /readyz, Events and the Node condition put words to them by `npu_agent.wording`.
"""

from __future__ import annotations

from npu_agent.core.kinds import SEVERITIES, Problem
from npu_agent.core.problems import agent, cards
from npu_agent.core.problems.notes import notes
from npu_agent.core.state import AgentState

__all__ = ["notes", "problems", "unready"]


def problems(state: AgentState) -> tuple[Problem, ...]:
    """Returns the problems that need a person, the most harmful first."""
    return tuple(sorted((*agent.problems(state), *cards.problems(state)), key=_urgency))


def _urgency(problem: Problem) -> tuple[int, bool]:
    """Within a severity, cards come before what is about the agent, unless Pods lose NPUs now."""
    late = problem.severity != "critical" and problem.subject != "card"
    return SEVERITIES.index(problem.severity), late


def unready(state: AgentState) -> tuple[Problem, ...]:
    """Returns the problems for which the agent is not ready; empty when it is.

    It is ready when the kubelet holds every resource that has cards open, or when another instance
    of the agent serves it (a rolling update with maxSurge waits for the new one to be ready before
    it ends the old one), and when the config file that is there is the one in force. Keys that
    wait for a restart do not count: only a restart would help, and that is the user's decision.
    """
    return tuple(problem for problem in problems(state) if problem.unready)
