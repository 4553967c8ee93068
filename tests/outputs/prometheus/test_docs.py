"""docs/metrics.md lists what the code has: the same names, types and labels of its own."""

import re
from pathlib import Path

import pytest

from npu_agent.outputs.prometheus import accounting, cards, own
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.prometheus import helpers
from tests.outputs.prometheus.test_golden import GOLDEN

TEXT = (Path(__file__).parents[3] / "docs/metrics.md").read_text()


def rows(prefix: str) -> dict[str, list[str]]:
    """The cells of the table's rows that begin with a metric of that prefix, by its name."""
    found = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        match = re.fullmatch(rf"`({prefix}\w+)`", cells[0])
        if match and len(cells) >= 4:
            found[match[1]] = cells[1:]
    return found


def test_every_metric_of_cards_is_listed_in_the_order_of_the_page() -> None:
    listed = list(rows("furiosa_npu_"))
    for schema in SCHEMAS.values():
        names = [definition.name for definition in cards.definitions((schema,))]
        assert listed == names


def test_what_is_unproven_is_marked_on_the_page_and_in_its_help() -> None:
    marked = {name for name, cells in rows("furiosa_npu_").items() if "#unproven" in cells[-1]}
    for schema in SCHEMAS.values():
        unproven = {metric.name for metric in schema.metrics if "rngd" in metric.unproven}
        assert unproven == marked
        said = {each.name for each in cards.definitions((schema,)) if "Unproven" in each.help}
        assert said == marked


def test_every_metric_of_the_agent_is_listed_with_its_type() -> None:
    listed = {name: cells[0] for name, cells in rows("npu_(?:agent|holder)_").items()}
    definitions = (*accounting.DEFINITIONS, *own.DEFINITIONS)
    assert listed == {definition.name: definition.kind for definition in definitions}


@pytest.mark.parametrize("name", rows("npu_agent_"))
def test_labels_of_the_agents_metrics_are_those_of_the_page(name: str) -> None:
    pages = [(GOLDEN / f"{host}.0.8.txt").read_bytes() for host in ("mixed-fusion", "claims")]
    samples = [
        sample
        for page in pages
        for metric in helpers.parsed(page, openmetrics=False)
        for sample in metric.samples
        if re.fullmatch(rf"{name}(_bucket)?", sample.name)
    ]
    assert samples
    listed = set(re.findall("`([a-z_]+)`", rows("npu_agent_")[name][1]))
    assert {label for sample in samples for label in sample.labels} - {"le"} == listed
