"""The whole page of a simulated host, read as a real one is: a golden file for each schema."""

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core.counts import Counts, DraCounts
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.ledger import PreparedClaim
from npu_agent.core.state import (
    ConditionState,
    DraState,
    EvictionState,
    SessionPhase,
    SessionStatus,
    SlicesState,
    TlsState,
)
from npu_agent.people.cards import at_one_moment, read_once
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.golden import golden
from tests.inventory.helpers import tree
from tests.outputs.helpers import DRIVER, RESOURCE, claim, used
from tests.outputs.prometheus.helpers import held, own, own_page, page_of_cards, parsed, series

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_000.0

HOST = "warboy=2,rngd=1"


def _pinned(found: Snapshot) -> Snapshot:
    """With what differs from look to look made the same."""

    def pinned(state: CardState) -> CardState:
        assert state.reading is not None
        # One look cannot tell how much a core does.
        cores = tuple(replace(core, utilization=12.5 * core.core) for core in state.reading.cores)
        narrow = (8, 16) if state.card.index == 0 else None
        return replace(
            state,
            card=replace(state.card, lanes=narrow),
            reading=replace(state.reading, at=NOW - 2.5, cores=cores),
        )

    return replace(found, cards=tuple(map(pinned, found.cards)))


def _driver(claims: tuple[PreparedClaim, ...]) -> DraState:
    counts = DraCounts()
    counts.prepared("prepared", 0.004)
    counts.prepared("prepared", 0.03)
    counts.prepared("refused", 0.0007)
    counts.unprepares["unprepared"] += 1
    return DraState(
        session=SessionStatus(resource=DRIVER, phase=SessionPhase.REGISTERED),
        counts=counts,
        slices=SlicesState(published=True, generation=1, slices=1, devices=2, writes=3),
        claims=claims,
    )


def page(found: Snapshot, schema: str, *, openmetrics: bool) -> str:
    """A page as `npu_agent.outputs.prometheus.exposition` puts it together, but for ``process_*``.

    Two Pods have a core of the first card each, two others share the second by a claim, and the
    third is one container's.
    """
    first, second, third = found.cards
    shared = claim("shared", second, pods=("a", "b"))
    text = page_of_cards(
        found,
        held(f"{first.id}_cores_0", "single-a"),
        held(f"{first.id}_cores_1", "single-b"),
        held(third.id, "fusion"),
        held("GPU-1", "other", "nvidia.com/gpu"),
        claims=(shared,),
        uses=used(shared, "main"),
        schema=SCHEMAS[schema],
        openmetrics=openmetrics,
    ).decode()
    counts = Counts(messages=2)
    counts.allocated("granted", 0.0007)
    counts.preferred["one card"] += 1
    text += own_page(
        own(
            (SessionStatus(resource=RESOURCE, phase=SessionPhase.REGISTERED), counts),
            now=1_700_000_000.0 + NOW,
            monotonic=NOW,
            snapshot=found,
            dra=(_driver((shared,)),),
            cordons={third.id: "swap fan"},
            trends=at_one_moment(found),
            expected_cards=3,
            condition=ConditionState(type="example.com/Ready", status=True),
            labels_applied=Counter(written=1),
            events=Counter(sent=3),
            evictions=EvictionState(results={"evicted": 1, "failed": 0}),
            reading_failures={("warboy", "npu0", "hung"): 1},
            restarts=Counter(inventory=0),
            page_failures=Counter(cards=0),
            authorizations=Counter(allowed=7, forbidden=1),
            tls=TlsState(expires_at=2_000_000_000.0),
            refused={("metrics", "open"): 2, ("probes", "open"): 0},
        ),
        openmetrics=openmetrics,
    ).decode()
    return re.sub('python="[^"]*"', 'python="3"', text) + ("# EOF\n" if openmetrics else "")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    root = tree(tmp_path_factory.mktemp("host") / "host", HOST)
    return _pinned(asyncio.run(read_once(Furiosa(root))))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_pages_are_as_in_their_golden_files(host: Snapshot, schema: str) -> None:
    text = page(host, schema, openmetrics=False)
    openmetrics = page(host, schema, openmetrics=True)
    assert text == golden(GOLDEN / f"{schema}.txt", text)
    told = parsed(text.encode(), openmetrics=False)
    assert series(told) == series(parsed(openmetrics.encode(), openmetrics=True))
    assert all(metric.documentation for metric in told)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_with_names_of_our_own() -> None:
    """Those of the other schemas are the vendor's."""
    text = (GOLDEN / "prometheus.txt").read_bytes()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
