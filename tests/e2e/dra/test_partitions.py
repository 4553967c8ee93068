"""Cards that are cut on demand: the scheduler counts, and no core is given away twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.dra.claims import CONFIG, run, running, seen, slices, waits
from tests.e2e.manifests import DRIVER, Thing, selected, small, template
from tests.e2e.node import SOON, Node

CUT: dict[str, Any] = {**CONFIG, "dra": {"partitions": True}}
CARD = 2
"""The first RNGD."""
WIDTHS = {8: DRIVER, **{n: f"furiosa.ai-rngd-{n}core.{6 * n}gb" for n in (4, 2, 1)}}
"""The class for each number of cores."""
ALL = 2 * 3 + 6 * 15
"""Devices of two Warboys and six RNGD in all widths."""


pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("classes")]


@pytest.fixture(autouse=True)
def cut(node: Node) -> Iterator[None]:
    """Cards are offered in all widths, until the test has ended."""
    configure(node, CUT, ALL)
    yield
    node.delete_pods()
    configure(node, CONFIG, 8)


def configure(node: Node, config: Thing, count: int) -> None:
    """Edits the config of the agent, which follows it; so many devices are offered then."""
    node.configure(config)
    wait_offered(node, count)


def wait_offered(node: Node, count: int) -> None:
    """Waits until so many devices are offered."""
    node.wait_equal("devices", lambda: len(offered(node)), count, 2 * SOON)


def offered(node: Node) -> dict[str, Thing]:
    """All devices of a complete pool, by name."""
    found = slices(node)
    pools = [each["spec"]["pool"] for each in found]
    assert {pool["resourceSliceCount"] for pool in pools} == {len(pools)}, pools
    assert len({pool["generation"] for pool in pools}) == 1, pools
    devices = [one for each in found for one in each["spec"].get("devices") or ()]
    return {one["name"]: one for one in devices}


def of_card(node: Node) -> dict[str, Thing]:
    """The devices of the one card, by their cores: ``0-3``, and "" for all."""
    mine = {
        name: one
        for name, one in offered(node).items()
        if one["attributes"]["index"]["int"] == CARD
    }
    return {name.partition("-cores-")[2]: one for name, one in mine.items()}


def tainted(node: Node) -> dict[str, str]:
    """The taint of each device of the one card that has one, without the driver's name."""
    return {
        cores: taint["key"].removeprefix(f"{DRIVER}/")
        for cores, one in of_card(node).items()
        for taint in one.get("taints") or ()
    }


def part(cores: int) -> Thing:
    """A request for so many cores of the one card."""
    exactly = {"deviceClassName": WIDTHS[cores], **selected(f"index == {CARD}")}
    return {"name": "npu", "exactly": exactly}


def pods(*widths: int) -> list[Thing]:
    """A Pod for each, with its template; they are called as they come."""
    return [
        thing
        for at, cores in enumerate(widths)
        for thing in (
            template(f"part-{at}-of-{cores}", part(cores)),
            small(f"part-{at}-of-{cores}", of_template=f"part-{at}-of-{cores}"),
        )
    ]


def cores_in(node: Node, name: str) -> set[int]:
    """The cores whose nodes a container has; its variable names exactly those."""
    found = seen(node, name)
    pattern = rf"npu{CARD}pe(\d+)(?:-(\d+))?"

    def cores(text: str) -> set[int]:
        spans = re.findall(pattern, text)
        return {core for a, b in spans for core in range(int(a), int(b or a) + 1)}

    given = cores(" ".join(found.nodes))
    assert given == cores(found.environment["NPU_DEVNAME"]), found
    assert found.cards == {CARD}
    return given


def test_a_card_serves_four_pods_and_then_one(node: Node) -> None:
    things = pods(4, 2, 1, 1)
    run(node, *things)
    names = [thing["metadata"]["name"] for thing in things if thing["kind"] == "Pod"]
    cores = [cores_in(node, name) for name in names]
    assert sorted(map(len, cores)) == [1, 1, 2, 4]
    assert set.union(*cores) == set(range(8))
    node.apply([template("whole", part(8)), small("whole", of_template="whole")])
    waits(node, "whole")
    # Who has which cores, on the node.
    info = node.in_agent("npu-agent", "info")
    (row,) = (line for line in info.splitlines() if f"npu{CARD} " in line)
    for name, mine in zip(names, cores, strict=True):
        span = "-".join(str(core) for core in dict.fromkeys((min(mine), max(mine))))
        assert f"default/{name} ({span})" in row, info
    node.delete_pods(*names[1:])
    waits(node, "whole")
    node.delete_pods(names[0])
    running(node, "whole")
    assert cores_in(node, "whole") == set(range(8))


def test_parts_are_kept_while_cards_are_cut_and_whole_by_turns(node: Node) -> None:
    run(node, *pods(2))
    mine = cores_in(node, "part-0-of-2")
    node.apply(template("whole", part(8)))
    configure(node, CONFIG, 8)
    node.wait_equal("the card to be held", lambda: tainted(node), {"": "held"})
    node.apply(small("whole", of_template="whole"))
    waits(node, "whole")
    configure(node, CUT, ALL)
    node.wait_for("no taint", lambda: not tainted(node))
    waits(node, "whole")
    run(node, template("other", part(4)), small("other", of_template="other"))
    assert not mine & cores_in(node, "other")
    configure(node, CONFIG, 8)
    node.delete_pods("part-0-of-2", "other")
    running(node, "whole", timeout=2 * SOON)
    assert cores_in(node, "whole") == set(range(8))
    # A whole card has the same name either way: the scheduler counts it, and nothing is tainted.
    configure(node, CUT, ALL)
    assert not tainted(node)
    node.apply(pods(1))
    waits(node, "part-0-of-1")
