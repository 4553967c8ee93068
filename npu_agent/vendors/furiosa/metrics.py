"""The vendor's two generations of metric names and units, and one by Prometheus' own conventions.

docs/metrics.md has the tables. The vendor's share names with other units, and so one schema is
served at a time. What has no unit has the same name in all three.
"""

from __future__ import annotations

from typing import Any

from npu_agent.core.hardware import SensorKind
from npu_agent.core.vendor import MetricName, MetricSchema, MetricSource
from npu_agent.vendors.furiosa.families import FAMILIES

_HELP: dict[MetricSource, str] = {
    MetricSource.ALIVE: "Whether the driver says that the card works: 1 or 0.",
    MetricSource.INFO: "What the card is, in its labels; always 1.",
    MetricSource.HEALTH: (
        "The health of the card: 1 for the state that it is in, 0 for the others."
    ),
    MetricSource.ASSIGNED: "The container that holds cores of the card; always 1.",
    MetricSource.UPTIME: "Seconds since the firmware of the card started.",
    MetricSource.ERRORS: (
        "Errors that the driver, or the kernel on the PCI bus, has counted, by kind (label)."
    ),
    MetricSource.THROTTLED: (
        "How often each reason (label) to slow the card down has begun since the agent's start."
    ),
    MetricSource.THROTTLE: (
        "Whether the driver slows the card down now, by reason (label) that has begun since the "
        "agent's start: 1 or 0."
    ),
    MetricSource.POWER_LIMIT: "Watts that the card may take.",
    MetricSource.SLOWDOWN: "The temperature in °C at which the driver slows the card down.",
    MetricSource.LINK_LANES: "The lanes of the card's PCIe link that are in use.",
    MetricSource.LINK_SPEED: "Transfers a second of each lane of the card's PCIe link.",
    MetricSource.UTILIZATION: (
        "Per cent of the core's cycles spent on tasks between the last two readings."
    ),
    MetricSource.FREQUENCY: "The clock of the core in MHz.",
    MetricSource.DRAM_TOTAL: "Bytes of the card's memory that the user of the core may take.",
    MetricSource.DRAM_USED: "Bytes of the card's memory that the user of the core has taken.",
    MetricSource.CYCLES: "Cycles that the core has counted so far.",
    MetricSource.TASK_CYCLES: "Cycles that the core has spent on tasks so far.",
}
"""For every schema, but where a unit differs."""


def _metric(name: str, quantity: MetricSource, **values: Any) -> MetricName:
    """The family of this name; `values` are others of `MetricName`."""
    return MetricName(
        name=f"furiosa_npu_{name}",
        source=quantity,
        unproven=tuple(
            family.name
            for family in FAMILIES.values()
            if any(quantity in file.quantities for file in family.unproven)
        ),
        **{"help": _HELP.get(quantity, ""), **values},
    )


def _sensors(name: str, unit: str, kind: SensorKind, per_unit: int = 1) -> MetricName:
    """The sensors of one kind; their values are divided by `per_unit`."""
    text = f"The {kind.name.lower()} in {unit}, by sensor (label)."
    return _metric(name, MetricSource.SENSORS, help=text, sensors=kind, per_unit=per_unit)


_ALIVE = _metric("alive", MetricSource.ALIVE)
_LIMITS = (
    _metric("throttle_reason", MetricSource.THROTTLE),
    _metric("power_limit_watts", MetricSource.POWER_LIMIT),
    _metric("slowdown_temperature_celsius", MetricSource.SLOWDOWN),
    _metric("pcie_link_lanes", MetricSource.LINK_LANES),
    _metric("pcie_link_transfers_per_second", MetricSource.LINK_SPEED, per_unit=1e-9),
)
"""Not in the vendor's generations: the same in every schema."""
_STATES = (
    _metric("info", MetricSource.INFO),
    _metric("health", MetricSource.HEALTH),
    _metric("assigned", MetricSource.ASSIGNED),
)
"""Without a unit: the same in every schema."""


def _generation(temperature: MetricName, power: MetricName) -> tuple[MetricName, ...]:
    """The metrics of one of the vendor's two generations, which differ in these."""
    return (
        _ALIVE,
        _metric("uptime", MetricSource.UPTIME),
        _metric("error", MetricSource.ERRORS),
        temperature,
        power,
        _sensors("hw_voltage", "mV (thousandths of 1 V)", SensorKind.VOLTAGE),
        _sensors("hw_current", "mA (thousandths of 1 A)", SensorKind.CURRENT),
        _metric("throttling_events_count", MetricSource.THROTTLED),
        *_LIMITS,
        _metric("core_utilization", MetricSource.UTILIZATION),
        _metric("core_frequency", MetricSource.FREQUENCY),
        _metric("dram_total", MetricSource.DRAM_TOTAL),
        _metric("dram_usage", MetricSource.DRAM_USED),
        _metric("total_cycle_count", MetricSource.CYCLES),
        _metric("task_execution_cycle", MetricSource.TASK_CYCLES),
        *_STATES,
    )


_BASE_UNITS = (
    _ALIVE,
    _metric("uptime_seconds", MetricSource.UPTIME),
    _metric("errors_total", MetricSource.ERRORS, kind="counter"),
    _sensors("temperature_celsius", "celsius", SensorKind.TEMPERATURE, 1_000),
    _sensors("power_watts", "watts", SensorKind.POWER, 1_000_000),
    _sensors("voltage_volts", "volts", SensorKind.VOLTAGE, 1_000),
    _sensors("current_amperes", "amperes", SensorKind.CURRENT, 1_000),
    _metric("throttling_events_total", MetricSource.THROTTLED, kind="counter"),
    *_LIMITS,
    _metric(
        "core_utilization_ratio",
        MetricSource.UTILIZATION,
        help="Share of the core's cycles spent on tasks between the last two readings, 0 to 1.",
        per_unit=100,
    ),
    _metric(
        "core_frequency_hertz", MetricSource.FREQUENCY, help="The clock of the core.", per_unit=1e-6
    ),
    _metric("memory_limit_bytes", MetricSource.DRAM_TOTAL),
    _metric("memory_usage_bytes", MetricSource.DRAM_USED),
    _metric("core_cycles_total", MetricSource.CYCLES, kind="counter"),
    _metric("core_task_cycles_total", MetricSource.TASK_CYCLES, kind="counter"),
    *_STATES,
)

SCHEMAS: dict[str, MetricSchema] = {
    "0.8": MetricSchema(
        about="m°C, µW, mV, mA",
        metrics=_generation(
            _sensors("hw_temperature", "m°C (thousandths of 1 °C)", SensorKind.TEMPERATURE),
            _sensors("hw_power", "µW (millionths of 1 W)", SensorKind.POWER),
        ),
        renamed={},
    ),
    "2025": MetricSchema(
        about="°C, W",
        metrics=_generation(
            _sensors("hw_temperature", "°C", SensorKind.TEMPERATURE, 1_000),
            _sensors("hw_power", "W", SensorKind.POWER, 1_000_000),
        ),
        renamed={"rms_total": "rms"},
    ),
    "prometheus": MetricSchema(
        about="base units: °C, W, V, A, Hz, bytes, ratios",
        metrics=_BASE_UNITS,
        renamed={},
    ),
}
