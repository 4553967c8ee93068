"""An hour of load, with Pods that come and go, asked from a real Prometheus: the sums are right."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from npu_agent.core.accounting import UNHELD, Accounts, Holder
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
from npu_agent.outputs.prometheus import accounting
from npu_agent.people.simulator.telemetry import CardTelemetry, advance, fresh
from tests.monitoring.fleet import Prometheus, prometheus_of
from tests.monitoring.helpers import needs_promtool, promtool, rules
from tests.outputs.prometheus.helpers import card, own

HOUR, SCRAPE, READ, LONGEST = 3600, 10, 5, 15.0
CARDS = tuple(card(index=index, uuid=f"U{index}") for index in range(2))
ROLLOUT, CRASH, AWAY = 1505, 2405, 5
"""Seconds: when the next agent takes over; when one crashes, and how long it is away.

What Prometheus does not see any more is lost: what was used since the last scrape of the one, and
since the last evaluation of the rules before the crash of the other.
"""


@dataclass
class Hour:
    """A node's hour, second by second, and what its pages were."""

    base: float
    """When it begins, in seconds since 1970."""
    random: Random = field(default_factory=lambda: Random(28))
    pods: dict[tuple[str, int], tuple[Holder, int]] = field(default_factory=dict)
    """Who has each half of each card, until when."""
    used: defaultdict[str, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """What was used by each Pod and each card, counted here."""
    samples: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of each family, its samples with their times."""

    def play(self) -> None:
        accounts, instance = Accounts(), "old"
        telemetry = {state.id: fresh("rngd") for state in CARDS}
        last = dict(telemetry)
        shown: dict[str, CardState] = {state.id: state for state in CARDS}
        for now in range(HOUR + 1):
            if now == ROLLOUT:
                accounts, instance = Accounts(), "new"
            if now == CRASH:
                accounts = Accounts()
            self._churn(now)
            if now % READ == 0:
                for state in CARDS:
                    read = _reading(now, last[state.id], telemetry[state.id])
                    shown[state.id] = replace(state, reading=read)
                last = dict(telemetry)
            away = CRASH <= now < CRASH + AWAY
            if not away:
                snapshot = Snapshot(cards=tuple(shown.values()), complete=True)
                accounts.follow(snapshot, self._usages(), float(now), LONGEST)
                if now % SCRAPE == 0:
                    self._scrape(now, instance, accounts)
            for id_, before in telemetry.items():
                telemetry[id_] = advance(before, 1.0, self.random)
                if now < HOUR:
                    self._count(id_, before, telemetry[id_])

    def _churn(self, now: int) -> None:
        """Each half of a card has another Pod, or none, for half a minute to ten minutes."""
        for state in CARDS:
            for half in (0, 4):
                if now >= self.pods.get((state.id, half), (UNHELD, 0))[1]:
                    holder = UNHELD
                    if self.random.random() < 0.7:
                        claim = self.random.choice(("", f"claim-{now}"))  # by either API
                        name = f"pod-{now}-{state.id}-{half}"
                        holder = Holder("ml", name, f"uid-{name}", claim)
                    ends = now + self.random.randint(30, 600)
                    self.pods[state.id, half] = holder, ends

    def _usages(self) -> list[Usage]:
        return [
            Usage(
                id_,
                CoreRange(half, half + 3),
                Assignment(one.namespace, one.pod, "main", "r", f"{id_}-{half}", one.claim),
                one.uid,
            )
            for (id_, half), (one, _) in self.pods.items()
            if one != UNHELD
        ]

    def _count(self, id_: str, before: CardTelemetry, after: CardTelemetry) -> None:
        for core in range(8):
            cycles = after.task_cycles[core] - before.task_cycles[core]
            busy = cycles / (after.cycles[core] - before.cycles[core])
            half = core // 4 * 4
            for subject in (self.pods[id_, half][0].uid, id_):
                self.used[subject]["reserved"] += 1
                self.used[subject]["busy"] += busy
                self.used[subject]["joules"] += before.watts / 8

    def _scrape(self, now: int, instance: str, accounts: Accounts) -> None:
        state = own(now=self.base + now, monotonic=float(now))
        found = accounting.read(accounts.accounts, state)
        for definition in accounting.DEFINITIONS:
            page = definition.render(found, openmetrics=True).decode()
            pattern = rf"^{definition.name}{{(.*)}} (.*)$"
            for labels, value in re.findall(pattern, page, re.MULTILINE):
                labelled = f'{definition.name}{{{labels},instance="{instance}"}}'
                self.samples[definition.name].append(f"{labelled} {value} {self.base + now}")

    def openmetrics(self) -> Iterator[str]:
        for definition in accounting.DEFINITIONS:
            yield f"# TYPE {definition.name.removesuffix('_total')} {definition.kind}"
            yield from self.samples[definition.name]
        yield "# EOF\n"


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
async def test_the_holders_of_an_hour_add_up_to_their_cards(tmp_path: Path) -> None:
    base = math.floor(time.time() / 300) * 300.0 - 2 * HOUR
    hour = Hour(base)
    hour.play()
    (tmp_path / "hour.txt").write_text("\n".join(hour.openmetrics()))
    promtool("tsdb", "create-blocks-from", "openmetrics", "hour.txt", "data", cwd=tmp_path)
    (tmp_path / "prometheus.yaml").write_text("{}")
    async with prometheus_of(tmp_path) as prometheus:
        for record, key in (
            ("npu:core_seconds:used1m", "reserved"),
            ("npu:busy_core_seconds:used1m", "busy"),
            ("npu:energy_joules:used1m", "joules"),
        ):
            by_card = await _used(prometheus, record, "device", base + HOUR)
            for state in CARDS:
                expected = hour.used[state.id][key]
                assert by_card[state.card.name] == pytest.approx(expected, rel=0.01), record
            by_pod = await _used(prometheus, record, "uid", base + HOUR)
            wrong = sum(
                abs(by_pod.get(uid, 0.0) - counts[key])
                for uid, counts in hour.used.items()
                if uid not in {state.id for state in CARDS}
            )
            assert wrong < 0.03 * sum(by_card.values()), record


async def _used(prometheus: Prometheus, record: str, label: str, at: float) -> dict[str, float]:
    """What the rule has found in the hour until then, by the values of a label."""
    expression = rules("record")[record]["expr"]
    asked = f"sum by ({label}) (sum_over_time(({expression})[1h:1m]))"
    data = await prometheus.get("query", query=asked, time=str(at))
    return {each["metric"].get(label, ""): float(each["value"][1]) for each in data["result"]}
