"""An hour of load, with Pods that come and go, in Prometheus' own rules: the sums are right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from npu_agent.core.hardware import (
    CardState,
    CoreRange,
    CoreReading,
    Reading,
    Sensor,
    SensorKind,
    Snapshot,
)
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.outputs.prometheus import cards
from npu_agent.people.simulator.telemetry import CardTelemetry, advance, fresh
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.monitoring.helpers import judge, needs_promtool, rules
from tests.outputs.prometheus.helpers import card, own

HOUR, SCRAPE, READ, RULES = 3600, 10, 5, 30
"""Seconds; the last three are how often."""
CARDS = tuple(card(index=index, uuid=f"U{index}") for index in range(2))
ROLLOUT, CRASH, AWAY = 1505, 2405, 25
"""Seconds: when the next agent takes over; when one crashes, and how long it is away."""
RECORDS = {
    "npu:core_seconds:used30s": ("reserved", 0.01),
    "npu:busy_core_seconds:used30s": ("busy", 0.06),
    "npu:energy_joules:used30s": ("joules", 0.06),
    "npu:idle_core_seconds:used30s": ("idle", 0.15),
}
"""What each counts, and how exact its sum of a card over an hour is."""
NPU0 = 'hostname="node-1",arch="rngd",device="npu0"'
FAMILIES_USED = ("info", "assigned", "core_utilization", "hw_power")


@dataclass
class Hour:
    """A node's hour, second by second, and what its pages were."""

    random: Random = field(default_factory=lambda: Random(28))
    pods: dict[tuple[str, int], tuple[Assignment | None, int]] = field(default_factory=dict)
    """Who has each half of each card, until when."""
    used: defaultdict[str, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """What was used by each Pod and each card, counted here."""
    samples: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """Of each series, its values by the second of the scrape."""

    def play(self) -> None:
        telemetry = {state.id: fresh("rngd") for state in CARDS}
        last = dict(telemetry)
        shown: dict[str, CardState] = {state.id: state for state in CARDS}
        for now in range(HOUR + 1):
            self._churn(now)
            if now % READ == 0:
                for state in CARDS:
                    reading = _reading(now, last[state.id], telemetry[state.id])
                    shown[state.id] = replace(state, reading=reading)
                    self._count_idle(state.id, reading)
                last = dict(telemetry)
            if now % SCRAPE == 0 and not CRASH <= now < CRASH + AWAY:
                self._scrape(now, Snapshot(cards=tuple(shown.values()), complete=True))
            for id_, before in telemetry.items():
                telemetry[id_] = advance(before, 1.0)
                if now < HOUR:
                    self._count(id_, before, telemetry[id_])

    def _churn(self, now: int) -> None:
        """Each half of a card has another Pod, or none, for half a minute to ten minutes."""
        for state in CARDS:
            for half in (0, 4):
                if now >= self.pods.get((state.id, half), (None, 0))[1]:
                    holder = None
                    if self.random.random() < 0.7:
                        claim = self.random.choice(("", f"claim-{now}"))  # by either API
                        pod = f"pod-{now}-{state.id}-{half}"
                        holder = Assignment("ml", pod, "main", "r", f"{state.id}-{half}", claim)
                    ends = now + self.random.randint(30, 600)
                    self.pods[state.id, half] = holder, ends

    def _usages(self) -> list[Usage]:
        return [
            Usage(id_, CoreRange(half, half + 3), assignment)
            for (id_, half), (assignment, _) in self.pods.items()
            if assignment
        ]

    def _count(self, id_: str, before: CardTelemetry, after: CardTelemetry) -> None:
        for core in range(8):
            cycles = after.task_cycles[core] - before.task_cycles[core]
            busy = cycles / (after.cycles[core] - before.cycles[core])
            holder, _ = self.pods[id_, core // 4 * 4]
            for subject in (holder.pod if holder else "", id_):
                self.used[subject]["reserved"] += 1
                self.used[subject]["busy"] += busy
                self.used[subject]["joules"] += before.watts / 8

    def _count_idle(self, id_: str, reading: Reading) -> None:
        for core in reading.cores:
            if reading.at and core.utilization is not None and core.utilization < 1:
                self.used[id_]["idle"] += READ

    def _scrape(self, now: int, snapshot: Snapshot) -> None:
        state = own(snapshot=snapshot, usages=tuple(self._usages()))
        series = cards.series(state, pod_labels=True)
        instance = "new" if now > ROLLOUT else "old"
        for family in cards.families(SCHEMAS["2025"], series):
            if family.name.removeprefix("furiosa_npu_") in FAMILIES_USED:
                page = family.render(openmetrics=False).decode()
                for labels, value in re.findall(r"^\w+{(.*)} (.*)$", page, re.MULTILINE):
                    name = f'{family.name}{{{labels},instance="{instance}"}}'
                    self.samples[name][now] = value

    def series(self) -> dict[str, str]:
        """As promtool takes them; each goes stale with the scrape that lacks it."""
        made = {}
        for name, samples in self.samples.items():
            values = [samples.get(at, "_") for at in range(0, max(samples) + 1, SCRAPE)]
            made[name] = f"{' '.join(values)} stale"
        return made


def _reading(now: int, before: CardTelemetry, after: CardTelemetry) -> Reading:
    return Reading(
        at=float(now),
        sensors=(Sensor(SensorKind.POWER, "rms", round(after.watts * 1e6)),),
        cores=tuple(
            CoreReading(core=core, utilization=100 * _load(before, after, core))
            for core in range(8)
        ),
    )


def _load(before: CardTelemetry, after: CardTelemetry, core: int) -> float:
    passed = after.cycles[core] - before.cycles[core]
    return (after.task_cycles[core] - before.task_cycles[core]) / passed if passed else 0.0


@needs_promtool
def test_the_holders_of_an_hour_add_up_to_their_cards(tmp_path: Path) -> None:
    """docs/monitoring.md promises what is asked here."""
    hour = Hour()
    hour.play()
    cards_used = {state.card.name: hour.used.pop(state.id) for state in CARDS}
    del hour.used[""]
    assert len(hour.used) > 30, "Pods come and go"
    too_far = []
    for record, (key, most) in RECORDS.items():
        for name, used in cards_used.items():
            summed = _summed(f'{record}{{device="{name}"}}')
            too_far.append(f"abs({summed} / {used[key]} - 1) > {most}")
    for pod, used in hour.used.items():
        summed = _summed(f'npu:core_seconds:used30s{{pod="{pod}"}}')
        too_far.append(f"abs({summed} - {used['reserved']}) > 4 * {RULES + SCRAPE}")
    _none_holds(tmp_path, hour.series(), too_far)


def _summed(selector: str) -> str:
    """What the rules have found in the hour: its last 120 evaluations."""
    return f"(sum(sum_over_time({selector}[{HOUR - RULES // 2}s])) or vector(0))"


def _none_holds(directory: Path, series: Mapping[str, str], expressions: Iterable[str]) -> None:
    """promtool evaluates the rules for an hour, and then finds nothing by any of these."""
    nothing: dict[str, dict[str, float]] = {expression: {} for expression in expressions}
    every = {"at": f"{HOUR}s", "scraped": f"{SCRAPE}s", "evaluated": f"{RULES}s"}
    judge(directory, series, nothing, **every)


@needs_promtool
def test_each_core_of_a_card_has_its_holders_or_is_free(tmp_path: Path) -> None:
    """Whatever its width, whether by one Pod or by several that share a claim."""
    held = (("0-3", "a"), ("4-5", "b"), ("4-5", "c"), ("6", "d"))
    series = {f'furiosa_npu_info{{{NPU0},core="0-7"}}': "1x360"}
    for core, pod in held:
        labels = f'{NPU0},core="{core}",namespace="ml",pod="{pod}",instance="{pod}"'
        series[f"furiosa_npu_assigned{{{labels}}}"] = "1x360"
    expected = {"a": 4, "b": 1, "c": 1, "d": 1, "": 1}
    _none_holds(
        tmp_path,
        series,
        [
            f'{_summed(f"""npu:core_seconds:used30s{{pod="{pod}"}}""")} != {cores * HOUR}'
            for pod, cores in expected.items()
        ],
    )


@needs_promtool
def test_a_job_that_names_the_agents_pod_does_not_charge_it(tmp_path: Path) -> None:
    target = 'namespace="kube-system",pod="npu-agent-x"'
    holder = 'exported_namespace="ml",exported_pod="a"'
    series = {
        f'furiosa_npu_info{{{NPU0},{target},core="0-7"}}': "1x360",
        f'furiosa_npu_assigned{{{NPU0},{target},{holder},core="0-7"}}': "1x360",
    }
    held = _summed('npu:core_seconds:used30s{namespace="ml",pod="a"}')
    _none_holds(tmp_path, series, [f"{held} != {8 * HOUR}"])


def test_the_rules_know_each_range_of_cores_that_a_card_can_have() -> None:
    """PromQL cannot count a range: the rule has a row for each core."""
    expression = rules("record")["npu:core_holding"]["expr"]
    rows = re.findall(r'core=~"([^"]+)"}\), "core", "(\d+)"', expression)
    for family in FAMILIES.values():
        cores = family.card(0, product=family.name).core_count
        for first in range(cores):
            for last in range(first, cores):
                found = [
                    int(core)
                    for pattern, core in rows
                    if re.fullmatch(pattern, str(CoreRange(first, last)))
                ]
                assert found == list(range(first, last + 1))
