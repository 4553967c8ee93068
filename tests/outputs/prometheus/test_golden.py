"""Whole pages for simulated hosts, read by the code that reads real ones: a golden file each."""

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core.accounting import Account, Accounts, Subject
from npu_agent.core.claim import ClaimUse
from npu_agent.core.counts import Counts, DraCounts
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.ledger import Assignment, PreparedClaim, Usage
from npu_agent.core.state import (
    ConditionState,
    DraState,
    SessionPhase,
    SessionStatus,
    SlicesState,
    TlsState,
)
from npu_agent.core.trends import at_one_moment
from npu_agent.inventory.inventory import read_once
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.golden import golden
from tests.inventory.helpers import management, tree, write
from tests.outputs.helpers import DRIVER, RESOURCE, claim, holdings, used
from tests.outputs.prometheus.helpers import held, own, own_page, page_of_cards, parsed, series

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_000.0

Edit = Callable[[Path], None]
Holders = Callable[[tuple[CardState, ...]], list[Assignment]]
Claimed = tuple[tuple[PreparedClaim, ...], tuple[ClaimUse, ...]]


def _nothing(_root: Path) -> None:
    pass


def _old_driver(root: Path) -> None:
    for name, content in {
        "device_uuid": "\n",
        "fw_version": "",
        "alive": None,
        "heartbeat": None,
        "soc_rev": None,
    }.items():
        write(management(root, 0) / name, content)


def _no_hwmon(root: Path) -> None:
    address = (management(root, 0) / "busname").read_text()
    shutil.rmtree((root / "sys/bus/pci/devices" / address).resolve() / "hwmon")


def _fusion(found: tuple[CardState, ...]) -> list[Assignment]:
    """Every card but the first is one container's."""
    return [held(state.id, f"fusion-{state.card.index}") for state in found[1:]]


def _single(found: tuple[CardState, ...]) -> list[Assignment]:
    """Cores of the first card are two Pods'; the second card's are one container's."""
    first, *rest = found
    return [
        held(f"{first.id}_cores_0", "single-a"),
        held(f"{first.id}_cores_1", "single-b"),
        *(held(f"{state.id}_cores_{core}", "single-c") for state in rest for core in (0, 1)),
    ]


def _claimed(found: tuple[CardState, ...]) -> Claimed:
    """The first card is one container's by a claim; two Pods share the second by another."""
    train, shared = claim("train", found[0]), claim("shared", found[1], pods=("a", "b"))
    return (train, shared), (*used(train, "main"), *used(shared, "main"))


def _nobody(_: tuple[CardState, ...]) -> list[Assignment]:
    return []


HOSTS: dict[str, tuple[str, Edit, Holders]] = {
    "no-cards": ("warboy=0", _nothing, _nobody),
    "warboy-single": ("warboy=2", _nothing, _single),
    "rngd-single": ("rngd=1", _nothing, _single),
    "mixed-fusion": ("warboy=1,rngd=1", _nothing, _fusion),
    "old-driver": ("warboy=1", _old_driver, _nobody),
    "no-hwmon": ("warboy=1", _no_hwmon, _nobody),
    "claims": ("rngd=2", _nothing, _nobody),
}


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


def _accounts(found: Snapshot, held: tuple[Usage, ...]) -> dict[Subject, Account]:
    """After ten seconds with two readings."""
    accounts = Accounts()
    for at, read_at in (NOW - 10, NOW - 7.5), (NOW - 7.5, NOW - 7.5), (NOW, NOW - 2.5):
        readings = ((card, card.reading) for card in found.cards)
        cards = (
            replace(card, reading=reading and replace(reading, at=read_at))
            for card, reading in readings
        )
        accounts.follow(replace(found, cards=tuple(cards)), held, at, longest=15.0)
    return accounts.accounts


def page(found: Snapshot, holders: Holders, schema: str, *, openmetrics: bool, dra: bool) -> str:
    """A page as `npu_agent.outputs.prometheus.page` puts it together, but for ``process_*``."""
    claims, uses = _claimed(found.cards) if dra else ((), ())
    held_now = holdings(found, *holders(found.cards), claims=claims, uses=uses)
    text = page_of_cards(
        found,
        *holders(found.cards),
        held("GPU-1", "other", "nvidia.com/gpu"),
        claims=claims,
        uses=uses,
        schemas=(SCHEMAS[schema],),
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
            dra=(_driver(claims),) if dra else (),
            cordons={found.cards[-1].id: "swap fan"} if found.cards else {},
            trends=at_one_moment(found),
            condition=ConditionState(type="example.com/Ready", status=True),
            labels_applied=Counter(written=1),
            events=Counter(sent=3),
            reading_failures={("warboy", "npu0", "hung"): 1},
            restarts=Counter(inventory=0),
            page_failures=Counter(cards=0),
            authorizations=Counter(allowed=7, forbidden=1),
            tls=TlsState(expires_at=2_000_000_000.0),
            refused={("metrics", "open"): 2, ("probes", "open"): 0},
        ),
        _accounts(found, held_now),
        openmetrics=openmetrics,
    ).decode()
    return re.sub('python="[^"]*"', 'python="3"', text) + ("# EOF\n" if openmetrics else "")


@pytest.fixture(scope="module", params=HOSTS)
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Snapshot, Holders]:
    name: str = request.param
    asked_for, edit, holders = HOSTS[name]
    root = tree(tmp_path_factory.mktemp(name) / "host", asked_for)
    edit(root)
    return name, _pinned(asyncio.run(read_once([Furiosa(root)]))), holders


@pytest.mark.parametrize("schema", SCHEMAS)
def test_pages_are_as_in_their_golden_files(
    host: tuple[str, Snapshot, Holders], schema: str
) -> None:
    name, found, holders = host
    dra = name == "claims"
    text = page(found, holders, schema, openmetrics=False, dra=dra)
    openmetrics = page(found, holders, schema, openmetrics=True, dra=dra)
    assert text == golden(GOLDEN / f"{name}.{schema}.txt", text)
    if name == "mixed-fusion":
        assert openmetrics == golden(GOLDEN / f"{name}.{schema}.openmetrics.txt", openmetrics)
    told = parsed(text.encode(), openmetrics=False)
    shown = series(parsed(openmetrics.encode(), openmetrics=True))
    # The text format has no place for when a counter began.
    assert series(told) == {key: shown[key] for key in shown if not key[0].endswith("_created")}
    assert all(metric.documentation for metric in told)


VENDOR_NAMES = {
    f'{name} {kinds} metrics should not have "{suffix}" suffix'
    for name, kinds, suffix in (
        ("furiosa_npu_dram_total", "non-counter", "_total"),
        ("furiosa_npu_total_cycle_count", "non-histogram and non-summary", "_count"),
    )
}
"""What promtool finds fault with in the vendor's schemas: two of their names."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "path",
    [path for path in sorted(GOLDEN.glob("*.txt")) if path.suffixes[-2] != ".openmetrics"],
    ids=lambda path: path.stem,
)
def test_promtool_finds_no_fault_but_with_the_vendors_names(path: Path) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=path.read_bytes(), capture_output=True
    )
    found = set(done.stderr.decode().splitlines())
    assert found <= (set() if ".prometheus" in path.suffixes else VENDOR_NAMES)
    assert done.returncode == (3 if found else 0)
