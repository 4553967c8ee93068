"""Draws the dashboard: `make pictures`.

No Grafana: each panel's query is asked from a real Prometheus, and drawn by matplotlib where the
panel is. It has scraped the simulated nodes of tests/monitoring for two minutes. Needs Prometheus
(`make packages`).
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import pyplot
from PIL import Image

from tests.monitoring.fleet import Prometheus, fleet
from tests.monitoring.helpers import DASHBOARDS

HERE = Path(__file__).parent
ROWS = {"Now", "Nodes", "Cards", "Pods and namespaces"}
"""Those that are drawn. The nodes of the tests have no DRA, and the agents are this project's."""
UNIT = (0.55, 0.3)
"""Inches of a unit of Grafana's grid."""
LEGEND = 10
"""The most series of which a legend has room."""
LONGEST = 12
"""Lines of a table that are drawn."""
UNITS = {"percent": "%", "celsius": "°C", "watt": "W"}
"""As Grafana names them, and as people write them."""
COLORS = {"green": "#56a64b", "red": "#e02f44", "yellow": "#e0b400", "orange": "#ff780a"}
Series = tuple[str, list[float], list[float]]
"""A name, times and values."""
Shown = list[tuple[dict[str, Any], list[Any]]]
"""Panels, and what each of their queries found: samples, or series."""


@dataclass(frozen=True)
class Asked:
    """A Prometheus, and the time range that is asked for."""

    prometheus: Prometheus
    until: float
    seconds: int
    step: int

    async def shown(self, uid: str) -> Shown:
        return [(panel, await self._found(panel)) for panel in _unfolded(DASHBOARDS[uid])]

    async def _found(self, panel: dict[str, Any]) -> list[Any]:
        targets = panel.get("targets", ())
        if panel["type"] in ("stat", "table"):
            return [await self._samples(target) for target in targets]
        return [await self._series(target) for target in targets]

    async def _samples(self, target: dict[str, Any]) -> list[Any]:
        query = self._filled(target["expr"])
        data = await self.prometheus.get("query", query=query, time=str(self.until))
        samples: list[Any] = data["result"]
        return samples

    async def _series(self, target: dict[str, Any]) -> list[Series]:
        data = await self.prometheus.get(
            "query_range",
            query=self._filled(target["expr"]),
            start=str(self.until - self.seconds),
            end=str(self.until),
            step=str(self.step),
        )
        return [
            (
                _named(target["legendFormat"], one["metric"]),
                [float(at) - self.until for at, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in data["result"]
        ]

    def _filled(self, expression: str) -> str:
        values = {
            "__rate_interval": f"{5 * self.step}s",
            "__range": f"{self.seconds}s",
            "__interval": f"{self.step}s",
        }
        return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".*"), expression)


async def main() -> None:
    # All of it before any is drawn: that takes the loop from the simulated agents.
    async with fleet() as prometheus:
        await asyncio.sleep(90)
        now = await Asked(prometheus, time.time(), 120, 2).shown("npu-agent")
    _draw(now, HERE / "dashboard-npu-agent.png")


def _unfolded(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels, each where it is when these rows are open and the others are not there."""
    placed, shift = [], 0
    for panel in dashboard["panels"]:
        if panel["type"] == "row" and panel["title"] not in ROWS:
            shift -= 1
            continue
        inner = panel.get("panels", ())
        placed += [_lower(one, shift) for one in (panel, *inner)]
        if inner:
            begin = panel["gridPos"]["y"] + 1
            shift += max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in inner) - begin
    return placed


def _lower(panel: dict[str, Any], by: int) -> dict[str, Any]:
    grid = panel["gridPos"]
    return {**panel, "gridPos": {**grid, "y": grid["y"] + by}}


def _draw(shown: Shown, path: Path) -> None:
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in shown)
    figure = pyplot.figure(figsize=(24 * UNIT[0], height * UNIT[1]))
    for panel, found in shown:
        grid = panel["gridPos"]
        left, top = grid["x"] / 24, 1 - grid["y"] / height
        if panel["type"] == "row":
            figure.text(left + 0.004, top - 0.8 / height, panel["title"], weight="bold", size=11)
            continue
        aside = 0.07 if panel["type"] == "state-timeline" else 0.03
        box = (left + aside, top - (grid["h"] - 0.6) / height)
        size = (grid["w"] / 24 - aside - 0.01, (grid["h"] - 1.8) / height)
        axes = figure.add_axes((*box, *size))
        axes.set_title(fill(_title(panel), 6 * grid["w"]), loc="left", size=9)
        _panel(panel, found, axes)
    figure.savefig(path, dpi=72)
    pyplot.close(figure)
    few = Image.open(path).convert("RGB").quantize(64)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _title(panel: dict[str, Any]) -> str:
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
    return f"{panel['title']} ({UNITS[unit]})" if unit in UNITS else panel["title"]


def _panel(panel: dict[str, Any], found: list[Any], axes: Any) -> None:
    match panel["type"]:
        case "stat":
            ((sample, *_),) = found
            axes.text(0.5, 0.3, _number(sample["value"][1]), ha="center", size=20)
            axes.axis("off")
        case "table":
            _table(panel, found, axes)
        case kind:
            series = [one for each in found for one in each]
            if not series:
                axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", size=8)
            elif kind == "state-timeline":
                _states(panel, series, axes)
            else:
                _lines(series, axes)
            axes.xaxis.set_ticklabels([])
            axes.tick_params(labelsize=7)


def _lines(series: list[Series], axes: Any) -> None:
    for name, times, values in series:
        axes.plot(times, values, label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(series) <= LEGEND:
        axes.legend(fontsize=7, loc="center left")


def _states(panel: dict[str, Any], series: list[Series], axes: Any) -> None:
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    for row, (_, times, values) in enumerate(series):
        for at, value in zip(times, values, strict=True):
            state = mapping["options"].get(f"{value:g}", {"color": "grey"})
            color = COLORS.get(state["color"], "grey")
            axes.barh(row, times[1] - times[0], left=at, height=0.8, color=color)
    axes.set_yticks(range(len(series)), [name for name, _, _ in series])


def _table(panel: dict[str, Any], found: list[Any], axes: Any) -> None:
    columns = panel["transformations"][-1]["options"]["renameByName"]
    rows: list[dict[str, str]] = []
    for target, samples in zip(panel["targets"], found, strict=True):
        name = "Value" if len(found) == 1 else f"Value #{target['refId']}"
        for sample in samples:
            labels = {key: text for key, text in sample["metric"].items() if key in columns}
            fits = (row for row in rows if name not in row and labels.items() <= row.items())
            if (row := next(fits, None)) is None:
                rows.append(row := labels)
            row[name] = _cell(sample["value"][1])
    shown = sorted([row.get(key, "") for key in columns] for row in rows)
    axes.axis("off")
    made = axes.table(
        shown[:LONGEST] or [["" for _ in columns]],
        colLabels=list(columns.values()),
        loc="upper left",
        cellLoc="left",
        edges="horizontal",
    )
    made.auto_set_font_size(False)
    made.set_fontsize(8)
    made.auto_set_column_width(list(range(len(columns))))


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _cell(text: str) -> str:
    milliseconds = float(text)
    if milliseconds > 1e11:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%H:%M:%S}"
    return _number(text)


def _number(text: str) -> str:
    number = float(text)
    return f"{number:.0f}" if number == round(number) or number > 1000 else f"{number:.3g}"


if __name__ == "__main__":
    asyncio.run(main())
