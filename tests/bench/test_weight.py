"""How much of the package the running agent is: the number `process` of budgets.toml."""

from __future__ import annotations

import ast
import asyncio
import tomllib
import urllib.request
from pathlib import Path

from bench.process import running
from tests import budgets

PAGES = ("", "metrics", "status.json", "runbook")


async def test_the_running_agent_is_within_its_budget() -> None:
    """With DRA and the defaults, after its pages were read; what it loads late counts too."""
    async with running("rngd=2", dra=True) as agent:
        await agent.settled()
        for name in PAGES:
            await asyncio.to_thread(_read, f"http://127.0.0.1:{agent.port}/{name}")
        inside = await agent.inside()
    allowed = tomllib.loads((budgets.ROOT / "budgets.toml").read_text(encoding="utf-8"))["process"]
    trees = (ast.parse(Path(module).read_text("utf-8")) for module in inside.modules)
    loaded = sum(map(budgets.statements, trees))
    assert loaded <= allowed, "make it smaller, or say in the commit why it has to grow"
    rooms = budgets.statements_by_room(budgets.ROOT / "npu_agent")
    people = sum(count for room, count in rooms.items() if room.startswith("people"))
    assert loaded > (sum(rooms.values()) - people) / 2, "it did not load the agent"


def _read(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert answer.read()
