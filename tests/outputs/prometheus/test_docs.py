"""docs/metrics.md lists what the code has: the same names, types and labels of its own."""

import re
from pathlib import Path

import pytest

from npu_agent.core.vendor import MetricSource
from npu_agent.outputs.prometheus import cards, own
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.prometheus import helpers
from tests.outputs.prometheus.test_golden import GOLDEN

TEXT = (Path(__file__).parents[3] / "docs/metrics.md").read_text(encoding="utf-8")


def rows(prefix: str) -> dict[str, list[str]]:
    """The cells of the tables' rows that begin with a metric of that prefix, by its name."""
    found = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        match = re.fullmatch(rf"`({prefix}\w+)`", cells[0])
        if match and len(cells) >= 3:
            found[match[1]] = cells[1:]
    return found


def rows_of(schema: str) -> dict[str, list[str]]:
    """The same of the cards' metrics, by their names in that schema."""
    by_vendors_name = rows("furiosa_npu_")
    if schema != "prometheus":
        return by_vendors_name
    return {cells[1].strip("`"): cells for cells in by_vendors_name.values()}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_metric_of_cards_is_listed_in_the_order_of_the_page(schema: str) -> None:
    names = [family.name for family in cards.families(SCHEMAS[schema], ())]
    assert list(rows_of(schema)) == names


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_unproven_metric_is_marked_on_the_page_and_in_its_help(schema: str) -> None:
    marked = {name for name, cells in rows_of(schema).items() if "#unproven" in cells[-1]}
    metrics = SCHEMAS[schema].metrics
    assert {metric.name for metric in metrics if "rngd" in metric.unproven} == marked
    families = cards.families(SCHEMAS[schema], ())
    said = {family.name for family in families if "Unproven" in family.help}
    assert said == marked


def test_a_metric_without_a_unit_has_one_name_in_every_schema() -> None:
    """The rules and dashboards ask for these by one name."""
    for source in (MetricSource.INFO, MetricSource.HEALTH, MetricSource.ASSIGNED):
        names = {
            metric.name
            for schema in SCHEMAS.values()
            for metric in schema.metrics
            if metric.source is source
        }
        assert len(names) == 1


def test_the_names_of_opentelemetry_are_mapped_from_metrics_that_there_are() -> None:
    _, _, section = TEXT.partition("### By OpenTelemetry's names")
    section, _, _ = section.partition("### Labels")
    mapped = set(re.findall(r"\bfuriosa_npu_\w+", section))
    assert "furiosa_npu_temperature_celsius" in mapped
    assert mapped <= {metric.name for metric in SCHEMAS["prometheus"].metrics}


def test_every_metric_of_the_agent_is_listed_with_its_type() -> None:
    listed = {name: cells[0] for name, cells in rows("npu_agent_").items()}
    assert listed == {family.name: family.kind for family in own.families(helpers.own())}


@pytest.mark.parametrize("name", rows("npu_agent_"))
def test_labels_of_the_agents_metrics_are_those_of_the_page(name: str) -> None:
    page = (GOLDEN / "0.8.txt").read_bytes()
    samples = [
        sample
        for metric in helpers.parsed(page, openmetrics=False)
        for sample in metric.samples
        if re.fullmatch(rf"{name}(_bucket)?", sample.name)
    ]
    assert samples
    listed = set(re.findall("`([a-z_]+)`", rows("npu_agent_")[name][1]))
    assert {label for sample in samples for label in sample.labels} - {"le"} == listed
