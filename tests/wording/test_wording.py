"""The words for all that there is to say, in each language, and that none of them is forgotten."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs, to_builtins

from npu_agent.core.hardware import Cause, Health, HealthState
from npu_agent.core.kinds import (
    TRAITS,
    Clause,
    ConditionClause,
    EvictionClause,
    Kind,
    Message,
    NamedCard,
    Problem,
)
from npu_agent.core.problems import notes, problems
from npu_agent.core.state import AgentState, SessionPhase
from npu_agent.core.timeline import ENTRIES, EntryKind, TimelineEntry
from npu_agent.wording import LANGUAGES, Writer, commands, of_problem
from npu_agent.wording.table import Sentences
from tests.core.test_problems import troubled
from tests.golden import golden
from tests.outputs.web.helpers import Scene, night

LANGUAGE = pytest.mark.parametrize("language", LANGUAGES)
TRANSLATION = pytest.mark.parametrize("language", LANGUAGES[1:])
HEALTH = Health(state=HealthState.UNHEALTHY, reason="REASON", since=0.0, cause=Cause.DEAD)
HOT = Message("Temperature", facts={"celsius": 97.24})
FACTS: dict[str, object] = {
    "celsius": 97.24,
    "own": 8,
    "other": 16,
    "reasons": "REASONS",
    "why": HEALTH,
    "details": ((HOT,), ("DETAIL",)),
    "detail": (HOT, Message("PowerLimitBelowDefault", facts={"own": 225.0, "other": 300.0})),
    "nodes": (("npu0", "npu0pe0"), ("npu1", "npu1pe0")),
    "pci": "0000:17:00.0",
    "devices": ("DEVICE",),
    "device": "DEVICE",
    "earlier": ("CARD",),
    "entries": ("/sys/ENTRY",),
    "here": 6,
    "any": True,
    "expected": 8,
    "service": "furiosa.ai/rngd",
    "phase": SessionPhase.REGISTERING,
    "again": False,
    "reason": "REASON",
    "trouble": "TROUBLE",
    "foreign": "FOREIGN",
    "error": "ERROR",
    "errors": "ERRORS",
    "silent": False,
    "served": True,
    "annotation": "npu-agent/cordoned",
    "name": "npu9",
    "ids": ("ID1", "ID2"),
    "meant": "ID1",
    "now": "npu1",
    "others": "ID2",
    "unknown": ("npu8", "npu9"),
    "node": "node-7",
    "cordon": "CORDON",
    "uncordon": "UNCORDON",
    "keys": "KEY",
    "text": "TEXT",
    "missing": ("/dev/NODE",),
    "limit": 90.0,
    "load": 81.4,
    "first": "ID1",
    "fields": "FIELDS",
    "version": "1.2.3",
    "title": "TITLE",
    "id": "ID2",
    "before": "npu2",
    "before_id": "ID1",
    "pod": "ml/train",
    "healthy": 6,
    "wanted": 8,
    "held": True,
    "seen": 8,
    "seconds": 31,
    "daemon": True,
    "budget": "BUDGET",
}
CARDS = (NamedCard("ID1", "npu0"), NamedCard("ID2", "npu1"))
PODS = ("ml/train-10", "ml/train-9")


def a_problem(kind: Kind, count: int, pods: tuple[str, ...] = ()) -> Problem:
    parts = (Problem("NodeNotWatched", facts=FACTS),) if kind == "APIServerAway" else ()
    cause = Cause.DEAD if TRAITS[kind].runbook == "npucardunhealthy" else None
    facts = {**FACTS, "details": ((HOT,), ("DETAIL",))[:count]}
    if kind == "LimitsAlike":
        facts["limit"] = HOT
    return Problem(kind, CARDS[:count], pods, facts, cause=cause, parts=parts)


def an_entry(kind: EntryKind) -> TimelineEntry:
    return TimelineEntry(kind, CARDS[:1], PODS[:1], facts=FACTS, subject="card")


def state() -> AgentState:
    return Scene().state()


def all_words(language: str) -> Iterator[str]:
    """Everything that can be said, a line each."""
    now = state()
    writer = Writer(language)
    for kind in TRAITS:
        for count, pods in ((1, ()), (2, PODS)):
            words = asdict(of_problem(a_problem(kind, count, pods), now, language))
            yield from (f"{kind} {name}: {text}" for name, text in words.items() if text)
    for entry in ENTRIES:
        yield f"{entry}: {writer.text(an_entry(entry))}"
    for cause in Cause:
        yield f"{cause.value}: {writer.reason(replace(HEALTH, cause=cause))}"
        every = Problem("AllCardsUnhealthy", CARDS, facts=FACTS, cause=cause)
        yield f"{cause.value}: {writer.text(every)}; {writer.remedy(every)}"
    clauses = (*get_args(Clause), *get_args(EvictionClause))
    clauses += get_args(ConditionClause) if language == "en" else ()
    for clause in clauses:
        yield f"{clause}: {writer.text(Message(clause, CARDS, PODS, FACTS))}"


@LANGUAGE
def test_the_words_of_a_language(language: str) -> None:
    text = "".join(f"{line}\n" for line in dict.fromkeys(all_words(language)))
    path = Path(__file__).parent / "golden" / f"{language}.txt"
    assert text == golden(path, text)


@TRANSLATION
def test_a_line_has_one_language(language: str) -> None:
    """Commands are English, and the facts of this test are words in capital letters."""
    quoted = re.compile(r"`[^`]*`|^\w+ (last_)?command: .*|^\w+ \w+: |npu-agent/cordoned")
    english = re.compile(r"(?:[a-z]{2,} )+[a-z]{2,}")
    lines = {line: quoted.sub("", line) for line in all_words(language)}
    assert [line for line, own in lines.items() if english.search(own)] == []


def test_the_english_table_has_every_kind_and_no_other() -> None:
    assert set(get_args(Kind)) == TRAITS.keys()
    assert set(get_args(EntryKind)) == ENTRIES.keys()
    english = Writer("en").own
    assert english.messages.keys() == {
        *TRAITS,
        *ENTRIES,
        *get_args(Clause),
        *get_args(EvictionClause),
        *get_args(ConditionClause),
    }
    assert english.causes.keys() == set(Cause)
    assert english.phases.keys() == set(SessionPhase)


@TRANSLATION
def test_a_translation_has_all_that_the_english_table_has(language: str) -> None:
    own, english = Writer(language).own, Writer("en").own
    # The Node condition is written in English.
    assert own.messages.keys() == english.messages.keys() - set(get_args(ConditionClause))
    assert (own.causes.keys(), own.phases.keys()) == (english.causes.keys(), english.phases.keys())
    for kind, translated in own.messages.items():
        words = english.messages[kind]
        assert fields(translated) == fields(words), kind
        filled = {name for name, value in to_builtins(words).items() if value}
        missing = {name for name in filled if not getattr(translated, name)}
        assert missing <= {"unready"}, kind


def fields(words: Sentences) -> set[str]:
    """The facts that a table's row quotes, but those that only choose a word."""
    texts = (words.headline, *words.detail, words.remedy, words.held, words.waits)
    return {
        name
        for text in texts
        for _, name, spec, _ in string.Formatter().parse(text)
        if name and "|" not in (spec or "")
    }


@LANGUAGE
def test_problems_of_the_rules_have_all_facts_that_the_words_quote(language: str) -> None:
    for now in (troubled().state(), night().state()):
        for problem in (*problems(now), *notes(now)):
            assert of_problem(problem, now, language).text


def test_many_cards_and_pods_are_named_in_natural_order_and_counted() -> None:
    cards = tuple(NamedCard(f"U{index}", f"npu{index}") for index in range(64))
    pods = tuple(f"default/train-{index}" for index in reversed(range(12)))
    readings = (Message("Temperature", facts={"celsius": 90.0 + at % 2}) for at in range(64))
    facts = {"details": tuple((reading,) for reading in readings)}
    problem = Problem("CardHot", cards, pods, facts)
    assert Writer("en").text(problem) == (
        "npu0, npu1, npu2, npu3 and 60 more are hot: npu0 90.0 °C; npu1 91.0 °C; npu2 90.0 °C; "
        "npu3 91.0 °C; in use by default/train-0, default/train-1, default/train-2, "
        "default/train-3 and 8 more"
    )
    assert Writer("ja").headline(problem) == "npu0、npu1、npu2、npu3、ほか60個が高温"
    unhealthy = Problem("AllCardsUnhealthy", cards, facts={"why": HEALTH})
    assert Writer("en").headline(unhealthy) == "64 cards are unhealthy"


def test_details_that_are_the_same_are_said_once() -> None:
    problem = Problem("CardHot", CARDS, facts={"details": ((HOT,), (HOT,))})
    assert Writer("en").text(problem) == "npu0, npu1 are hot: 97.2 °C"


def test_quoted_texts_are_no_templates() -> None:
    problem = Problem("LabelsNotApplied", facts={"error": "{error} {0} {cards} %s"})
    assert Writer("ko").text(problem).endswith(": {error} {0} {cards} %s")


def test_a_language_that_lacks_words_has_the_english_ones() -> None:
    writer = Writer("ko")
    writer.own = structs.replace(writer.own, messages={}, causes={})
    assert writer.text(Problem("LabelsPending")) == "the Node's labels are not applied yet"
    assert writer.reason(HEALTH) == "the driver reports the card dead (REASON)"


def test_no_first_command_deletes_the_pods_of_a_card_that_is_there() -> None:
    """The Pod that comes in place of one that was deleted may get the same card again."""
    of_cards = {kind for kind, traits in TRAITS.items() if traits.subject == "card"}
    for table in (commands.KINDS, commands.HELD):
        assert not {kind for kind in of_cards if "delete" in str(table.get(kind))}
    assert "CardVeryHot" in commands.LAST
