"""The chapter on DRA alone: each of its steps fails if what it shows does not happen."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from npu_agent import files
from npu_agent.kubelet.allocator import Allocator
from npu_agent.outputs.dra.claims import Claims
from npu_agent.people import simulator
from npu_agent.people.commands.demo_claims import ClaimsNode
from npu_agent.people.simulator.pluginmanager import PrepareError
from tests.outputs.deviceplugin.helpers import short_directory

TITLES = (
    "DRA:",
    "A Pod claims",
    "The claimed card dies",
    "A person takes the card",
    "The Pod is deleted",
    "Its container",
    "Cards are cut",
)


@asynccontextmanager
async def chapter() -> AsyncIterator[ClaimsNode]:
    with short_directory() as directory:
        specs = simulator.parse_cards(simulator.default_cards())
        node = ClaimsNode(directory, specs)
        try:
            yield node
        finally:
            await node.stop()


async def walked(node: ClaimsNode, count: int) -> list[str]:
    """What the first steps say."""
    return [line for _, step in node.steps[:count] async for line in step()]


async def test_each_step_says_what_happened() -> None:
    async with chapter() as node:
        said = await walked(node, 7)
    titles = (title for title, _ in node.steps)
    assert all(title.startswith(start) for title, start in zip(titles, TITLES, strict=True))
    assert any("unhealthy:NoSchedule" in line for line in said)
    assert any("furiosa.ai/NPUReady is False" in line for line in said)
    assert any("cordoned:NoSchedule" in line for line in said)
    assert any("still holds its cores" in line for line in said)
    cores = [line.partition("npu2pe")[2] for line in said if line.startswith("Pod ")]
    assert cores == ["0-3", "4-5", "6"]


async def test_an_agent_in_a_pod_of_a_cluster_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    async with chapter() as node:
        await walked(node, 2)


async def keep_everything(path: Path, content: bytes | None, **_: Any) -> None:
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


async def nothing(*_: object) -> None:
    pass


async def refused(_: Claims, refs: Any) -> dict[str, str]:
    return dict.fromkeys((ref.uid for ref in refs), "out of order")


@pytest.mark.parametrize(
    ("owner", "name", "broken", "steps", "error", "reason"),
    [
        (Claims, "prepare", refused, 1, PrepareError, "train-0: out of order"),
        (Allocator, "prepare", nothing, 4, OSError, "two claims have the same card"),
        (files, "replace", keep_everything, 5, OSError, "is still there"),
    ],
)
async def test_a_step_that_does_not_happen_says_so(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    broken: Callable[..., Any],
    steps: int,
    error: type[Exception],
    reason: str,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    async with chapter() as node:
        await walked(node, steps)
        with pytest.raises(error, match=reason):
            await anext(line async for line in node.steps[steps][1]() if not line)
