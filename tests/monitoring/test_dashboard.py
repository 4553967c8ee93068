"""The dashboards: what they ask for is there, in a Prometheus that scraped real agents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.fleet import Prometheus, fleet
from tests.monitoring.helpers import (
    COMPONENTS,
    DASHBOARDS,
    PROJECT,
    exported,
    judge,
    metrics_of,
    needs_promtool,
    panels,
    rules,
)
from tests.until import until

VARIABLES = {
    "cluster": ".*",
    "node": ".*",
    "card": ".*",
    "namespace": ".*",
    "__rate_interval": "10s",
    "__range": "5m",
    "__interval": "1s",
}
"""As Grafana fills them in when all is selected, and for a short time range."""


NODES = {"node-1", "node-2", "node-3"}


def _filled(expression: str, **selected: str) -> str:
    values = {**VARIABLES, **selected}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


ON_CALL, USAGE = DASHBOARDS["npu-agent"], DASHBOARDS["npu-agent-usage"]
PANELS = {panel["title"]: panel for each in DASHBOARDS.values() for panel in panels(each)}


def _targets(titles: Iterable[str] = PANELS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every query of these panels, with where it stands."""
    for title in titles:
        for target in PANELS[title]["targets"]:
            yield f"{title} {target['refId']}", target


def _stat(title: str) -> str:
    """The first query of this panel."""
    expression: str = PANELS[title]["targets"][0]["expr"]
    return expression


def _annotations() -> dict[str, dict[str, Any]]:
    """Those that ask Prometheus, by name."""
    return {
        each["name"]: each for each in ON_CALL["annotations"]["list"] if not each.get("builtIn")
    }


def _beyond_the_fleet(target: dict[str, Any]) -> bool:
    """Whether it asks for what an agent without DRA and API server does not have."""
    absent = ("npu_agent_dra_", "npu_agent_node_condition")
    return any(name.startswith(absent) for name in metrics_of(target["expr"]))


def _value(found: list[dict[str, Any]]) -> float:
    [sample] = found
    return float(sample["value"][1])


@needs_promtool
async def test_every_query_and_variable_finds_something_and_the_rules_work() -> None:
    """One test for all: it takes seconds until a Prometheus has seen enough."""
    # The fleet has no DRA and no API server: those panels are tried by promtool, below.
    missing = {
        where: target["expr"] for where, target in _targets() if not _beyond_the_fleet(target)
    }

    async with fleet() as prometheus:

        async def all_found() -> bool:
            for where, expression in list(missing.items()):
                if await prometheus.query(_filled(expression)):
                    del missing[where]
            return not missing

        try:
            await until(all_found, "every query of the dashboard finds something")
        except AssertionError as error:
            raise AssertionError(f"nothing is found by: {missing}") from error
        await until(lambda: _both_hold(prometheus), "both Pods are known to hold a card")
        works = f"({_filled(_stat('Utilisation by Pod'))}) > 50"
        await until(lambda: prometheus.query(works), "one Pod's card works")
        await until(lambda: prometheus.query("ALERTS"), "the rules were evaluated since")
        await _variables_have_values(prometheus)
        await _figures_are_right(prometheus)
        await _cards_are_held_by_whom_they_are(prometheus)
        await _units_are_the_same_in_every_schema(prometheus)
        await _annotations_are_where_they_should(prometheus)
        await _rules_work(prometheus)


async def _both_hold(prometheus: Prometheus) -> bool:
    """The kubelet lists the second Pod a second or two after the first."""
    return len(await prometheus.query("furiosa_npu_assigned")) == 2


async def _variables_have_values(prometheus: Prometheus) -> None:
    expected = {
        "cluster": [],
        "node": ["node-1", "node-2", "node-3"],
        "card": ["npu0", "npu1"],
        "namespace": ["default"],
    }
    for variable in (one for each in DASHBOARDS.values() for one in each["templating"]["list"]):
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert found
            selector = {"match[]": _filled(found[1])}
            values = await prometheus.get(f"label/{found[2]}/values", **selector)
            assert values == expected[variable["name"]]


async def _figures_are_right(prometheus: Prometheus) -> None:
    """What `fleet` says of its nodes."""
    expected = {
        "": {"Nodes": 3, "Cards": 5, "Unhealthy cards": 1, "In use": 2, "Free": 2},
        "node-1": {"Nodes": 1, "Cards": 2, "Unhealthy cards": 1, "In use": 0, "Free": 1},
        "node-2": {"Nodes": 1, "Cards": 2, "Unhealthy cards": 0, "In use": 2, "Free": 0},
    }
    for node, figures in expected.items():
        for title, figure in figures.items():
            found = await prometheus.query(_filled(_stat(title), node=node or ".*"))
            assert _value(found) == figure, f"{title} {node}"
    [idle] = await prometheus.query(_filled(_stat("Idle reservations")))
    [works] = await prometheus.query(f"({_filled(_stat('Utilisation by Pod'))}) > 50")
    assert {idle["metric"]["pod"], works["metric"]["pod"]} == {"train-0", "notebook-0"}


async def _cards_are_held_by_whom_they_are(prometheus: Prometheus) -> None:
    """The agent's own Pod, which the scrape knows, holds none."""
    holders = {
        (labels["hostname"], labels.get("namespace"), labels.get("pod"))
        for labels in (each["metric"] for each in await prometheus.query("furiosa_npu_info"))
    }
    assert holders == {
        ("node-1", None, None),
        ("node-2", "default", "train-0"),
        ("node-2", "default", "notebook-0"),
        ("node-3", None, None),
    }
    own = await prometheus.query('npu_agent_build_info or up{job="npu-agent"}')
    assert {each["metric"]["hostname"] for each in own} == NODES


async def _units_are_the_same_in_every_schema(prometheus: Prometheus) -> None:
    """node-1 serves m°C and µW, node-2 °C and W, node-3 base units by other names."""
    expressions = dict(_targets())
    for where, least, most in ("Temperature by card A", 20, 150), ("Power by card A", 0.5, 500):
        found = await prometheus.query(_filled(expressions[where]["expr"]))
        assert {sample["metric"]["hostname"] for sample in found} == NODES
        for sample in found:
            assert least < float(sample["value"][1]) < most


async def _annotations_are_where_they_should(prometheus: Prometheus) -> None:
    """One card is unhealthy; no config was changed or refused."""
    found = {
        name: await prometheus.query(_filled(each["expr"])) for name, each in _annotations().items()
    }
    (unhealthy,) = found.pop("Unhealthy")
    assert unhealthy["metric"].items() >= {"hostname": "node-1", "device": "npu0"}.items()
    assert found == {"Config": [], "Config refused": []}


async def _rules_work(prometheus: Prometheus) -> None:
    for group in (await prometheus.get("rules"))["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
            if rule["type"] == "recording":
                expression = rule["name"]
                # No label fails here, and people do not work on anything.
                if expression not in ("npu:label_failures", "npu:maintenance", "npu:cordoned"):
                    assert await prometheus.query(expression), f"{expression} records nothing"
    pending = await prometheus.query("ALERTS")
    alerts = {(each["metric"]["alertname"], each["metric"]["hostname"]) for each in pending}
    assert alerts == {("NpuCardUnhealthy", "node-1")}


CLAIMS = {
    "Claims prepared and unprepared A": {
        'result="prepared"': 4,
        'result="refused"': 2,
        'result="failed"': 0,
    },
    "Claims prepared and unprepared B": {'result="unprepared"': 2},
    "NodePrepareResources latency A": {'hostname="node-1"': 0.0099},
    "Cores held, by width of the device A": {"": 2},
    "Cores held, by width of the device B": {"": 2},
    "Cores held, by width of the device C": {"": 4},
    "Cores held, by width of the device D": {"": 0},
    "Node condition A": {'hostname="node-1",type="furiosa.ai/NPUReady"': 0},
}
"""What the panels that the fleet cannot fill show of `CLAIMED` after five minutes."""
DRIVER = 'driver="npu.furiosa.ai",instance="a"'
CORES = 'furiosa_npu_assigned{{hostname="node-1",arch="rngd",device="npu0",core="{}",pod="{}"}}'
CLAIMED = {
    'npu_agent_build_info{hostname="node-1",instance="a"}': "1x10",
    'npu_agent_build_info{hostname="node-2",instance="b"}': "1x10",
    'npu_agent_node_condition{type="furiosa.ai/NPUReady",instance="a"}': "0x10",
    f'npu_agent_dra_prepares_total{{{DRIVER},result="prepared"}}': "0+2x10",
    f'npu_agent_dra_prepares_total{{{DRIVER},result="refused"}}': "0+1x10",
    f'npu_agent_dra_prepares_total{{{DRIVER},result="failed"}}': "0x10",
    f'npu_agent_dra_unprepares_total{{{DRIVER},result="unprepared"}}': "0+1x10",
    f'npu_agent_dra_prepare_seconds_bucket{{{DRIVER},le="0.01"}}': "0+100x10",
    f'npu_agent_dra_prepare_seconds_bucket{{{DRIVER},le="+Inf"}}': "0+100x10",
    CORES.format("0-3", "a"): "1x10",
    CORES.format("4-5", "b"): "1x10",
    CORES.format("4-5", "c"): "1x10",
    CORES.format("6", "d"): "1x10",
    CORES.format("7", "e"): "1x10",
}
"""Two nodes have prepared claims by DRA; two Pods hold cores of a card by the same claim."""
CARD = 'hostname="node-1",arch="rngd",device="npu{}",instance="a"'
FIRST_SCREEN = {
    "Pods hit A": {"": 2},
    "Nodes without an agent A": {"": 1},
    "Alerts firing A": {"": 1},
    "What is broken, who is hit, since when A": {
        CARD.format(0) + ',state="unhealthy",reason="dead",namespace="ml",pod="a"': 1,
        CARD.format(0) + ',state="unhealthy",reason="dead",namespace="ml",pod="b"': 1,
        CARD.format(1) + ',state="unknown",reason="silent"': 1,
    },
    "What is broken, who is hit, since when B": {
        CARD.format(0) + ',state="unhealthy",reason="dead",namespace="ml",pod="a"': 120_000,
        CARD.format(0) + ',state="unhealthy",reason="dead",namespace="ml",pod="b"': 120_000,
    },
}
"""What it shows of `BROKEN` after five minutes."""
BROKEN = {
    f'furiosa_npu_health{{{CARD.format(0)},state="healthy"}}': "1x2 0x7",
    f'furiosa_npu_health{{{CARD.format(0)},state="unhealthy"}}': "0x2 stale",
    f'furiosa_npu_health{{{CARD.format(0)},state="unhealthy",reason="dead"}}': "_x3 1x6",
    f'furiosa_npu_health{{{CARD.format(1)},state="healthy"}}': "0x9",
    f'furiosa_npu_health{{{CARD.format(1)},state="unknown",reason="silent"}}': "1x9",
    f'furiosa_npu_health{{{CARD.format(2)},state="healthy"}}': "1x9",
    f'furiosa_npu_assigned{{{CARD.format(0)},core="0-3",namespace="ml",pod="a"}}': "1x9",
    f'furiosa_npu_assigned{{{CARD.format(0)},core="4-7",namespace="ml",pod="b"}}': "1x9",
    f'furiosa_npu_assigned{{{CARD.format(2)},core="0-7",namespace="ml",pod="c"}}': "1x9",
    f"furiosa_npu_info{{{CARD.format(0)}}}": "1x9",
    'furiosa_npu_info{hostname="node-2",arch="rngd",device="npu0",instance="b"}': "1x2 stale",
    'ALERTS{alertname="NpuCardUnhealthy",alertstate="firing",hostname="node-1"}': "1x9",
    'ALERTS{alertname="NpuCardFlapping",alertstate="pending",hostname="node-1"}': "1x9",
}
"""A card that died in the third minute with two holders, one without a holder of which nothing is
known, a healthy one, and a node that has gone; samples of each minute by series."""


@needs_promtool
@pytest.mark.parametrize(
    ("series", "panels_show", "interval"),
    [(CLAIMED, CLAIMS, {"__rate_interval": "2m"}), (BROKEN, FIRST_SCREEN, {"__interval": "1m"})],
    ids=["claims and the condition", "what is broken, who is hit, and since when"],
)
def test_panels_show(
    tmp_path: Path,
    series: dict[str, str],
    panels_show: dict[str, dict[str, float]],
    interval: dict[str, str],
) -> None:
    targets = dict(_targets())
    expected = {
        _filled(targets[where]["expr"], **interval): rows for where, rows in panels_show.items()
    }
    judge(tmp_path, series, expected)


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_the_dashboard_queries_existing_series(dashboard: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in panels(dashboard)]
    asked = set().union(*(metrics_of(target["expr"]) for _, target in _targets(titles)))
    noted = set().union(*(metrics_of(each["expr"]) for each in _annotations().values()))
    assert asked | noted <= exported()
    recorded = {name for name in asked if name.startswith("npu:")}
    assert recorded == (asked if dashboard is USAGE else set()), "the rules may not be installed"


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_the_dashboard_can_be_imported_as_it_is(uid: str) -> None:
    model = DASHBOARDS[uid]
    assert "__inputs" not in model
    assert model["uid"] == uid
    source, *others = model["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    own = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert all(one["datasource"] == own for one in others if one["type"] == "query")
    targets = [target for panel in panels(model) for target in panel["targets"]]
    assert all(each["datasource"] == own for each in (*panels(model), *targets))
    used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in targets)))
    named = {variable["name"] for variable in others} - {"runbook"}
    assert used - {"__rate_interval", "__range", "__interval"} == named


def test_panels_have_titles_and_numbers_of_their_own() -> None:
    assert len(PANELS) == sum(len(panels(each)) for each in DASHBOARDS.values())
    for each in DASHBOARDS.values():
        ids = [panel["id"] for panel in (*each["panels"], *panels(each))]
        assert len(set(ids)) == len([*panels(each), *_rows(each)])


def _rows(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] == "row"]


def test_broken_cards_fill_the_first_screen_and_other_rows_are_folded() -> None:
    first, *others = _rows(ON_CALL)
    assert not first["collapsed"]
    assert all(row["collapsed"] and row["panels"] for row in others)
    shown = [panel for panel in ON_CALL["panels"] if panel["type"] != "row"]
    assert {"What is broken, who is hit, since when", "Alerts"} <= {one["title"] for one in shown}
    # A screen of 1080 lines has room for 25 units of 38 pixels below Grafana's own bars.
    assert max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in shown) <= 25


def _links(panel: dict[str, Any]) -> Iterator[str]:
    for override in panel["fieldConfig"]["overrides"]:
        for one in override["properties"]:
            if one["id"] == "links":
                yield from (link["url"] for link in one["value"])


def test_links_lead_to_dashboards_and_by_columns_that_there_are() -> None:
    nowhere: dict[str, Any] = {}
    urls = [(link["url"], nowhere) for each in DASHBOARDS.values() for link in each["links"]]
    urls += [(url, panel) for panel in PANELS.values() for url in _links(panel)]
    assert {re.split(r"[?#]|://", url)[0] for url, _ in urls} == {
        "/d/npu-agent",
        "/d/npu-agent-usage",
        "http",
        "${runbook}",
    }
    for url, panel in urls:
        if found := re.match(r"/d/([\w-]+)", url):
            variables = {one["name"] for one in DASHBOARDS[found[1]]["templating"]["list"]}
            assert set(re.findall(r"var-(\w+)=", url)) <= variables
        for column in re.findall(r"__data\.fields\.(\w+)", url):
            assert column in panel["transformations"][-1]["options"]["renameByName"].values()


def test_an_alert_leads_to_its_place_in_the_runbook() -> None:
    """Grafana has its name, as Prometheus spells it."""
    page = (PROJECT / "npu_agent/outputs/web/runbook.en.html").read_text(encoding="utf-8")
    assert "${runbook}#${__data.fields.Alert}" in _links(PANELS["Alerts"])
    assert all(f'<span id="{alert}"></span>' in page for alert in rules("alert"))


def test_a_configmap_of_them_can_be_applied() -> None:
    """kubectl keeps what it applies in an annotation; all of an object have 256 KiB."""
    data = {
        path.name: path.read_text(encoding="utf-8")
        for path in (COMPONENTS / "dashboard").glob("*.json")
    }
    assert len(json.dumps({"data": data})) < 240_000


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_a_query_keeps_the_labels_that_its_legend_or_column_shows(panel: dict[str, Any]) -> None:
    """A label that is aggregated away would be an empty place."""
    expressions = [target["expr"] for target in panel["targets"]]
    if panel["type"] == "table":
        *_, order = panel["transformations"]
        labels = {name for name in order["options"]["indexByName"] if "Value" not in name}
        if panel["title"] != "Alerts":
            assert all(any(label in text for text in expressions) for label in labels)
    else:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"])
