"""The vendor's two generations of metric names and units; docs/metrics.md has the tables.

They share names with other units, and so are never served together.
"""

from __future__ import annotations

from npu_agent.core.hardware import SensorKind
from npu_agent.core.vocabulary import MetricName, MetricSchema, Quantity
from npu_agent.vendors.furiosa.families import FAMILIES

_BEFORE_SENSORS = (
    ("alive", Quantity.ALIVE, "Whether the driver says that the card works: 1 or 0."),
    ("uptime", Quantity.UPTIME, "Seconds since the firmware of the card started."),
    ("error", Quantity.ERRORS, "Errors that the driver has counted, by kind (label)."),
)
_AFTER_SENSORS = (
    (
        "core_utilization",
        Quantity.UTILIZATION,
        "Per cent of the core's cycles spent on tasks between the last two readings.",
    ),
    ("core_frequency", Quantity.FREQUENCY, "The clock of the core in MHz."),
    (
        "dram_total",
        Quantity.DRAM_TOTAL,
        "Bytes of the card's memory that the user of the core may take.",
    ),
    (
        "dram_usage",
        Quantity.DRAM_USED,
        "Bytes of the card's memory that the user of the core has taken.",
    ),
    ("total_cycle_count", Quantity.CYCLES, "Cycles that the core has counted so far."),
    (
        "task_execution_cycle",
        Quantity.TASK_CYCLES,
        "Cycles that the core has spent on tasks so far.",
    ),
    ("info", Quantity.INFO, "What the card is, in its labels; always 1."),
    (
        "health",
        Quantity.HEALTH,
        "The health of the card: 1 for the state that it is in, 0 for the others.",
    ),
    ("assigned", Quantity.ASSIGNED, "The container that holds cores of the card; always 1."),
)
"""Names without the prefix that all have, what they measure, and their help."""

_MILLIVOLTS = ("voltage", "mV (thousandths of 1 V)", SensorKind.VOLTAGE, 1)
_MILLIAMPERES = ("current", "mA (thousandths of 1 A)", SensorKind.CURRENT, 1)


def _schema(
    about: str, *sensors: tuple[str, str, SensorKind, int], renamed: dict[str, str]
) -> MetricSchema:
    """A generation: its sensors are a name, the unit, the kind, and by what values are divided."""
    return MetricSchema(
        about=about,
        families=FAMILIES.keys(),
        metrics=(
            *(_metric(*metric) for metric in _BEFORE_SENSORS),
            *(
                MetricName(
                    name=f"furiosa_npu_hw_{what}",
                    help=f"The {what} in {unit}, by sensor (label).",
                    quantity=Quantity.SENSORS,
                    sensors=kind,
                    per_unit=per_unit,
                )
                for what, unit, kind, per_unit in sensors
            ),
            *(_metric(*metric) for metric in _AFTER_SENSORS),
        ),
        renamed=renamed,
    )


def _metric(name: str, quantity: Quantity, text: str) -> MetricName:
    return MetricName(name=f"furiosa_npu_{name}", help=text, quantity=quantity)


SCHEMAS: dict[str, MetricSchema] = {
    "0.8": _schema(
        "m°C, µW, mV, mA",
        ("temperature", "m°C (thousandths of 1 °C)", SensorKind.TEMPERATURE, 1),
        ("power", "µW (millionths of 1 W)", SensorKind.POWER, 1),
        _MILLIVOLTS,
        _MILLIAMPERES,
        renamed={},
    ),
    "2025": _schema(
        "°C, W",
        ("temperature", "°C", SensorKind.TEMPERATURE, 1_000),
        ("power", "W", SensorKind.POWER, 1_000_000),
        _MILLIVOLTS,
        _MILLIAMPERES,
        renamed={"rms_total": "rms"},
    ),
}
"""By the name that the config key metrics.schema has for them."""
