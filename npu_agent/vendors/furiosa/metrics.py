"""The vendor's two generations of metric names and units, and one by Prometheus' own conventions.

docs/metrics.md has the tables. The vendor's share names with other units, and so one schema is
served at a time. What has no unit has the same name in all three.
"""

from __future__ import annotations

from typing import Any

from npu_agent.core.hardware import SensorKind
from npu_agent.core.vendor_spec import MetricName, MetricSchema, MetricSource
from npu_agent.vendors.furiosa.families import FAMILIES


def _metric(name: str, quantity: MetricSource, text: str, **values: Any) -> MetricName:
    """The family of this name; `values` are others of `MetricName`."""
    return MetricName(
        name=f"furiosa_npu_{name}",
        help=text,
        source=quantity,
        **values,
        unproven=tuple(
            family.name
            for family in FAMILIES.values()
            if any(quantity in file.quantities for file in family.unproven)
        ),
    )


def _sensors(name: str, unit: str, kind: SensorKind, per_unit: int = 1) -> MetricName:
    """The sensors of one kind; their values are divided by `per_unit`."""
    return MetricName(
        name=f"furiosa_npu_{name}",
        help=f"The {kind.name.lower()} in {unit}, by sensor (label).",
        source=MetricSource.SENSORS,
        sensors=kind,
        per_unit=per_unit,
    )


_ALIVE = _metric(
    "alive", MetricSource.ALIVE, "Whether the driver says that the card works: 1 or 0."
)
_STATES = (
    _metric("info", MetricSource.INFO, "What the card is, in its labels; always 1."),
    _metric(
        "health",
        MetricSource.HEALTH,
        "The health of the card: 1 for the state that it is in, 0 for the others.",
    ),
    _metric(
        "assigned", MetricSource.ASSIGNED, "The container that holds cores of the card; always 1."
    ),
)
"""Without a unit: the same in every schema."""

_LIMITS = (
    _metric(
        "throttle_reason",
        MetricSource.THROTTLE,
        "Whether the driver slows the card down now, by reason (label) that has begun since the "
        "agent's start: 1 or 0.",
    ),
    _metric("power_limit_watts", MetricSource.POWER_LIMIT, "Watts that the card may take."),
    _metric(
        "slowdown_temperature_celsius",
        MetricSource.SLOWDOWN,
        "The temperature in °C at which the driver slows the card down.",
    ),
)
"""Not in the vendor's generations: the same in every schema."""
_THROTTLED = (
    "How often each reason (label) to slow the card down has begun since the agent's start."
)

_BEFORE_SENSORS = (
    _ALIVE,
    _metric("uptime", MetricSource.UPTIME, "Seconds since the firmware of the card started."),
    _metric("error", MetricSource.ERRORS, "Errors that the driver has counted, by kind (label)."),
)
_ELECTRIC = (
    _sensors("hw_voltage", "mV (thousandths of 1 V)", SensorKind.VOLTAGE),
    _sensors("hw_current", "mA (thousandths of 1 A)", SensorKind.CURRENT),
    _metric("throttling_events_count", MetricSource.THROTTLED, _THROTTLED),
    *_LIMITS,
)
_AFTER_SENSORS = (
    _metric(
        "core_utilization",
        MetricSource.UTILIZATION,
        "Per cent of the core's cycles spent on tasks between the last two readings.",
    ),
    _metric("core_frequency", MetricSource.FREQUENCY, "The clock of the core in MHz."),
    _metric(
        "dram_total",
        MetricSource.DRAM_TOTAL,
        "Bytes of the card's memory that the user of the core may take.",
    ),
    _metric(
        "dram_usage",
        MetricSource.DRAM_USED,
        "Bytes of the card's memory that the user of the core has taken.",
    ),
    _metric("total_cycle_count", MetricSource.CYCLES, "Cycles that the core has counted so far."),
    _metric(
        "task_execution_cycle",
        MetricSource.TASK_CYCLES,
        "Cycles that the core has spent on tasks so far.",
    ),
    *_STATES,
)
"""What both of the vendor's generations have, before and after the sensors."""


_BASE_UNITS = (
    _ALIVE,
    _metric("uptime_seconds", MetricSource.UPTIME, "Seconds since the firmware started."),
    _metric(
        "errors_total",
        MetricSource.ERRORS,
        "Errors that the driver has counted, by kind (label).",
        kind="counter",
    ),
    _sensors("temperature_celsius", "celsius", SensorKind.TEMPERATURE, 1_000),
    _sensors("power_watts", "watts", SensorKind.POWER, 1_000_000),
    _sensors("voltage_volts", "volts", SensorKind.VOLTAGE, 1_000),
    _sensors("current_amperes", "amperes", SensorKind.CURRENT, 1_000),
    _metric("throttling_events_total", MetricSource.THROTTLED, _THROTTLED, kind="counter"),
    *_LIMITS,
    _metric(
        "core_utilization_ratio",
        MetricSource.UTILIZATION,
        "Share of the core's cycles spent on tasks between the last two readings, 0 to 1.",
        per_unit=100,
    ),
    _metric(
        "core_frequency_hertz", MetricSource.FREQUENCY, "The clock of the core.", per_unit=1e-6
    ),
    _metric(
        "memory_limit_bytes",
        MetricSource.DRAM_TOTAL,
        "Bytes of the card's memory that the user of the core may take.",
    ),
    _metric(
        "memory_usage_bytes",
        MetricSource.DRAM_USED,
        "Bytes of the card's memory that the user of the core has taken.",
    ),
    _metric(
        "core_cycles_total",
        MetricSource.CYCLES,
        "Cycles that the core has counted so far.",
        kind="counter",
    ),
    _metric(
        "core_task_cycles_total",
        MetricSource.TASK_CYCLES,
        "Cycles that the core has spent on tasks so far.",
        kind="counter",
    ),
    *_STATES,
)

SCHEMAS: dict[str, MetricSchema] = {
    "0.8": MetricSchema(
        about="m°C, µW, mV, mA",
        families=FAMILIES.keys(),
        metrics=(
            *_BEFORE_SENSORS,
            _sensors("hw_temperature", "m°C (thousandths of 1 °C)", SensorKind.TEMPERATURE),
            _sensors("hw_power", "µW (millionths of 1 W)", SensorKind.POWER),
            *_ELECTRIC,
            *_AFTER_SENSORS,
        ),
        renamed={},
    ),
    "2025": MetricSchema(
        about="°C, W",
        families=FAMILIES.keys(),
        metrics=(
            *_BEFORE_SENSORS,
            _sensors("hw_temperature", "°C", SensorKind.TEMPERATURE, 1_000),
            _sensors("hw_power", "W", SensorKind.POWER, 1_000_000),
            *_ELECTRIC,
            *_AFTER_SENSORS,
        ),
        renamed={"rms_total": "rms"},
    ),
    "prometheus": MetricSchema(
        about="base units: °C, W, V, A, Hz, bytes, ratios",
        families=FAMILIES.keys(),
        metrics=_BASE_UNITS,
        renamed={},
    ),
}
