"""Sentences for people, made from values: the only place that puts words to messages.

``en.json``, ``ko.json`` and ``ja.json`` are tables of words by kind, cause and phase, with format
fields that the facts of a `Message` fill; `table` has their form. Start reading at `Writer`;
`of_problem` has all that is said of a problem.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from npu_agent import typedjson
from npu_agent.core.hardware import Cause, Health
from npu_agent.core.kinds import Message, NamedCard, Problem
from npu_agent.core.state import AgentState, SessionPhase
from npu_agent.text import NAMED, natural
from npu_agent.wording import commands
from npu_agent.wording.table import CauseWords, Language, Sentences

LANGUAGES = ("en", "ko", "ja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A problem in words."""

    headline: str
    """``npu0 is unhealthy``."""
    text: str
    """The headline and what else there is to say, on one line."""
    remedy: str
    """Empty where there is none, or the text has it."""
    unready: str
    """What /readyz says; empty: the agent is ready in spite of it."""
    waits: str
    """What the agent does not do until the API server answers; else empty."""
    command: str
    """The first command for it, as its reader can type it; empty where there is none."""
    last_command: str
    """The command that deletes its Pods, if nothing else helps; empty where there are none."""


def of_problem(problem: Problem, state: AgentState, language: str = "en") -> Written:
    """Puts a problem into words; the commands are as its reader can type them."""
    writer = Writer(language)
    return Written(
        headline=writer.headline(problem),
        text=writer.text(problem),
        remedy=writer.remedy(problem),
        unready=writer.unready(problem) if problem.unready else "",
        waits=writer.waits(problem),
        command=commands.first(problem, state.invocation, state.node),
        last_command=commands.last(problem),
    )


@cache
def _table(language: str) -> Language:
    return typedjson.decode(Path(__file__).with_name(f"{language}.json").read_bytes(), Language)


class Writer(string.Formatter):
    """Puts messages into the words of one of `LANGUAGES`."""

    def __init__(self, language: str = "en") -> None:
        self.own = _table(language)

    def headline(self, message: Message) -> str:
        return self._filled(self._words(message).headline, message)

    def text(self, message: Message) -> str:
        """The headline and what else there is to say, on one line."""
        text = self._line(self._words(message).headline, message)
        if not isinstance(message, Problem) or message.kind == "APIServerAway":
            return text
        if message.pods and message.subject == "card":
            return self.used(text, message.pods)
        return self.own.parts["semicolon"].join((text, *map(self.unready, message.parts)))

    def remedy(self, message: Message) -> str:
        """What to do; empty where there is nothing, or the text has it."""
        words = self._words(message)
        of_host = isinstance(message, Problem) and message.of_host
        held = words.held if message.pods and not of_host else ""
        return self._filled(held or words.remedy, message)

    def unready(self, problem: Problem) -> str:
        """Why the agent is not ready because of it."""
        template = self._words(problem).unready
        if not template:
            return self.text(problem)
        line = self._line(template, problem)
        return self.own.parts["semicolon"].join((line, *map(self.unready, problem.parts)))

    def waits(self, problem: Problem) -> str:
        """What the agent does not do until the API server answers; else empty."""
        return self._filled(self._words(problem).waits, problem)

    def used(self, text: str, pods: Sequence[str]) -> str:
        """The text of a message, and the Pods that use the cards."""
        in_order = sorted(pods, key=natural)
        return self.own.parts["used"].format(text=text, pods=self._listed(in_order))

    def reason(self, health: Health) -> str:
        """The reason of a health state: plain words, then those of driver or probe."""
        if health.cause is None:
            return health.reason
        means = self.of_cause(health.cause).means
        return self.own.parts["quoted"].format(means=means, reason=health.reason)

    def of_cause(self, cause: Cause | None) -> CauseWords:
        """The words for an unhealthy card; an unknown cause counts as a dead card."""
        cause = cause or Cause.DEAD
        return self.own.causes.get(cause) or ENGLISH.own.causes[cause]

    def _words(self, message: Message) -> Sentences:
        return self.own.messages.get(message.kind) or ENGLISH.own.messages[message.kind]

    def _line(self, start: str, message: Message) -> str:
        templates = (start, *self._words(message).detail)
        filled = (self._filled(template, message) for template in templates)
        return self.own.parts["colon"].join(filter(None, filled))

    def _filled(self, template: str, message: Message) -> str:
        return self.vformat(template, (), self._values(message)) if template else ""

    def _values(self, message: Message) -> Mapping[str, object]:
        facts = message.facts
        of_cause = self.of_cause(message.cause)
        count = self.own.parts["count"].format(count=len(message.cards))
        values = {
            "remedy": of_cause.remedy,
            "shared": of_cause.shared,
            "cards": message.cards,
            "card": message.cards[:1],
            "names": count if len(message.cards) > NAMED else message.cards,
            "pods": message.pods,
            **facts,
        }
        if "details" in facts:
            values["details"] = self._details(message)
        if facts.get("again"):
            values["phase"] = self.own.parts["again"]
        if isinstance(message, Problem):
            values["waiting"] = self.own.parts["comma"].join(map(self.waits, message.parts))
        return values

    def format_field(self, value: Any, format_spec: str) -> str:
        """Formats a fact; ``is|are`` chooses by number or truth."""
        one, is_choice, other = format_spec.partition("|")
        if not is_choice:
            return format(self.shown(value), format_spec)
        single = len(value) == 1 if isinstance(value, tuple) else bool(value)
        return one if single else other

    def shown(self, value: object) -> Any:
        """A fact in words; numbers and texts as they are."""
        match value:
            case Health():
                return self.reason(value)
            case NamedCard():
                return value.name
            case SessionPhase():
                return self.own.phases[value]
            case Message():
                return self.text(value)
            case (Message(), *_):
                return self.own.parts["semicolon"].join(map(self.shown, value))
            case tuple():
                return self._listed(value)
        return value

    def _listed(self, values: Sequence[object]) -> str:
        """The first of them, and how many more there are: ``npu0, npu1 and 62 more``."""
        names = self.own.parts["comma"].join(str(self.shown(value)) for value in values[:NAMED])
        more = len(values) - NAMED
        return self.own.parts["more"].format(names=names, count=more) if more > 0 else names

    def _details(self, message: Message) -> str:
        """What is so of each card; said once if it is the same of all."""
        details = message.facts["details"]
        assert isinstance(details, tuple)  # noqa: S101 (as the rules have it)
        shown = {
            card.name: str(self.shown(detail))
            for card, detail in zip(message.cards[:NAMED], details, strict=False)
        }
        if len({*shown.values()}) == 1:
            return next(iter(shown.values()))
        return self.own.parts["semicolon"].join(
            f"{name} {detail}" for name, detail in shown.items()
        )


ENGLISH = Writer()
