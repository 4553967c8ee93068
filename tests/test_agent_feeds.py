"""Who follows what, by a running agent: the table of docs/dev/architecture.md has it."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from inspect import getclosurevars, isfunction
from typing import Any

import pytest

from npu_agent.agent.agent import Agent
from npu_agent.config.schema import ResourceSpec
from npu_agent.feed import Feed, changes_of
from tests.docs.pages import page
from tests.test_agent_dra import Room, room
from tests.until import until

__all__ = ["room"]  # the fixture

TEXT = page("docs/dev/architecture.md").text
Readers = dict[str, set[Feed[Any]]]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    """The feeds that each part follows from now on, by the name of its class or function."""
    found: Readers = defaultdict(set)

    def note(*feeds: Feed[Any]) -> None:
        caller = sys._getframe(2)
        part = caller.f_locals.get("self")
        found[type(part).__name__ if part else caller.f_code.co_name].update(feeds)

    def noted_changes_of(*feeds: Feed[Any]) -> AsyncGenerator[None, None]:
        note(*feeds)
        return changes_of(*feeds)

    watch = Feed.watch

    def noted_watch(feed: Feed[Any]) -> AsyncIterator[Any]:
        note(feed)
        return watch(feed)

    monkeypatch.setattr(Feed, "watch", noted_watch)
    for name, module in sys.modules.items():
        if name.startswith("npu_agent.") and getattr(module, "changes_of", None) is changes_of:
            monkeypatch.setattr(module, "changes_of", noted_changes_of)
    return found


def named(agent: Agent) -> dict[Feed[Any], str]:
    """Every feed that a part has as an attribute for others: its class and the attribute."""
    names: dict[Feed[Any], str] = {}

    def visit(value: object) -> None:
        if isinstance(value, tuple):
            for item in value:
                visit(item)
        elif type(value).__module__.startswith("npu_agent.") and id(value) not in seen:
            seen.add(id(value))
            slots = getattr(type(value), "__slots__", ())
            fields = {name: getattr(value, name) for name in slots} or vars(value)
            for name, inner in fields.items():
                if not name.startswith("_"):
                    for item in inner.values() if isinstance(inner, dict) else (inner,):
                        if isinstance(item, Feed):
                            names.setdefault(item, f"{type(value).__name__}.{name}")
                        else:
                            visit(item)

    seen: set[int] = set()
    visit(agent)
    return names


def sources(names: dict[Feed[Any], str]) -> dict[Feed[Any], set[str]]:
    """The named feeds from which each feed is derived; a named one is its own."""
    found = {feed: {name} for feed, name in names.items()}

    def visit(feed: Feed[Any], of: set[str]) -> None:
        for derived in derived_from(feed):
            if derived not in names:
                found.setdefault(derived, set()).update(of)
                visit(derived, of)

    for feed, name in names.items():
        visit(feed, {name})
    return found


def derived_from(feed: Feed[Any]) -> Iterator[Feed[Any]]:
    for update in feed._derived:
        if isfunction(update):  # and not the `set` of a reader's event
            yield getclosurevars(update).nonlocals["derived"]


def followed(agent: Agent, readers: Readers) -> list[str]:
    """The rows of the table: each named feed, and who else follows it or one derived from it."""
    of, rows = sources(named(agent)), defaultdict(set)
    for reader, feeds in readers.items():
        for name in set[str]().union(*(of.get(feed, ()) for feed in feeds)):
            if name.partition(".")[0] != reader:
                rows[name].add(f"`{reader}`")
    return [f"| `{name}` | {', '.join(sorted(rows[name]))} |" for name in sorted(rows)]


async def test_the_table_of_feeds_is_true(room: Room, readers: Readers) -> None:
    """Cards of one family are offered by the device plugin, those of the other one by DRA."""
    [table] = re.findall(r"\| feed \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT)
    room.node.cards("warboy=1,rngd=1")
    by_dra = ResourceSpec(name="beta.furiosa.ai/rngd", family="rngd", api="dra")
    async with room.node.agent(resources=(by_dra,)) as agent:
        await room.registered()
        await room.node.listed(1)
        with suppress(AssertionError):  # the one below says more
            await until(lambda: followed(agent, readers) == table.splitlines(), interval=0.05)
        assert table.splitlines() == followed(agent, readers)
