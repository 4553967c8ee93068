"""What the agent makes of hosts whose owners published their values: one golden file a host."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core.comparison import begun
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.trends import degraded
from npu_agent.outputs.dra.slices import slices
from npu_agent.outputs.labels.compute import Machine, labels
from npu_agent.people.cards import at_one_moment, read_once
from npu_agent.people.commands import view
from npu_agent.vendors.furiosa.labels import SETS
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.golden import golden
from tests.hosts.records import HOSTS, Host
from tests.outputs.dra.cards import pool_of
from tests.outputs.prometheus.helpers import page_of_cards, parsed

GOLDEN = Path(__file__).parent / "golden"
_OF_A_CARD = (
    *("core", "device", "uuid", "serial", "numa_node"),
    *("pci_bus_id", "hostname", "driver_version", "firmware_version"),
)
_SIMULATED = re.compile("cycle|npu_pe|uptime")


def read(host: Host, root: Path) -> Snapshot:
    """The host's cards, as an agent has them that has read them once."""

    def reported(state: CardState) -> CardState:
        assert state.reading
        reading = replace(state.reading, throttled=begun(None, state.reading))
        return replace(state, reading=reading)

    found = asyncio.run(read_once(Furiosa(host.make(root))))
    return replace(found, cards=tuple(map(reported, found.cards)))


def metrics(found: Snapshot, schema: str) -> list[str]:
    """A line a metric and label: its values by card, of a core the last one's."""
    values: dict[str, dict[str, float]] = {}
    for family in parsed(page_of_cards(found, schema=SCHEMAS[schema]), openmetrics=False):
        for name, of, value, *_ in family.samples:
            rest = [text for key, text in of.items() if key not in _OF_A_CARD]
            values.setdefault(" ".join((name, *rest)), {})[of["device"]] = value
    return [
        f"{name}: {', '.join(f'{card} {value:g}' for card, value in of.items())}"
        for name, of in values.items()
        if not _SIMULATED.search(name)
    ]


def devices(found: Snapshot) -> list[str]:
    marks = degraded(at_one_moment(found))
    pool = pool_of(*found.cards, degraded=marks)
    (made,) = slices(pool, driver="npu.furiosa.ai", node="node", uid="uid", generation=1)
    return [json.dumps(device).replace('"', "") for device in made["spec"]["devices"]]


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_of_records_look_as_in_their_golden_files(name: str, tmp_path: Path) -> None:
    found = read(HOSTS[name], tmp_path / "host")
    # The schema that dashboards of its generation ask for.
    schema = "2025" if HOSTS[name].cards else "0.8"
    text = "\n".join(
        (
            "# info -o wide",
            re.sub(r"(?m)^\+.*\n?|(?<= ) +", "", view.drawn(view.cards_table(found, wide=True))),
            "# trends",
            *(
                f"{trend.card.card.name} {kind.value}: {trend.detail}"
                for (kind, _), trend in at_one_moment(found).found.items()
            ),
            "# labels",
            *(
                f"{key} = {value}"
                for key, value in labels(
                    found, Machine(vendor=None, name=None), [SETS["beta"], SETS["current"]]
                ).items()
            ),
            f"# metrics: {schema}",
            *metrics(found, schema),
            "# slices",
            *devices(found),
            "",
        )
    )
    assert text == golden(GOLDEN / f"{name}.txt", text)
