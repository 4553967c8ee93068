"""The text of /metrics: the cards, the agent itself and its process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from npu_agent.core.state import AgentState
from npu_agent.core.vendor import MetricSchema
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.outputs.prometheus import cards, own
from npu_agent.outputs.prometheus.text import MetricFamily

log = logger(__name__)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ExpositionSettings:
    """The config of the exposition."""

    schema: MetricSchema
    pod_labels: bool


class Exposition:
    """Renders /metrics. 8 cards of 8 cores take 2 ms; `bench` prints it as `scrape`."""

    def __init__(self, state: Callable[[], AgentState], settings: Feed[ExpositionSettings]) -> None:
        self.failures: Counter[str] = Counter()
        """Of each family that could not be rendered and was left out."""
        self._state = state
        self._settings = settings
        self._failing: set[str] = set()

    def body(self, openmetrics: bool) -> bytes:
        sources: dict[str, Callable[[], tuple[MetricFamily, ...]]] = {}
        if state := self._attempt("state", self._state):
            sources = {"cards": partial(self._cards, state), "own": partial(own.families, state)}
        sources["process"] = own.of_process
        pieces = []
        for name, families in sources.items():
            for family in self._attempt(name, families) or ():
                render = partial(family.render, openmetrics=openmetrics)
                pieces.append(self._attempt(family.name, render) or b"")
        return b"".join(pieces) + (b"# EOF\n" if openmetrics else b"")

    def _cards(self, state: AgentState) -> tuple[MetricFamily, ...]:
        settings = self._settings.value
        series = cards.series(state, pod_labels=settings.pod_labels)
        return cards.families(settings.schema, series)

    def _attempt(self, name: str, make: Callable[[], Made]) -> Made | None:
        """Returns the result of `make`; None if it fails, which is counted and, at first, logged.

        An odd value costs its family and no other.
        """
        try:
            made = make()
        except Exception:
            self.failures[name] += 1
            if name not in self._failing:
                self._failing.add(name)
                log.exception("a part of the metrics page is left out", family=name)
            return None
        self._failing.discard(name)
        return made
