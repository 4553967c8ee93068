"""Metric families as values, and as the text that Prometheus reads: pure.

Why not prometheus_client's own encoder: it sorts and escapes the labels of every sample each time,
which for 8 cards of 8 cores takes 23 ms of the loop; building and rendering the families here takes
4. The tests compare the two. Formats: Prometheus text format 0.0.4
and OpenMetrics 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from npu_agent.core.counts import Histogram

Source = TypeVar("Source")

LONGEST = 256
"""Characters of a label value; what is longer is cut."""
_MOST_NAMED = 1024
"""Series of one subject whose labels are kept."""
_EXACT = 1 << 53
"""Integers below this are written as such; Prometheus knows floats only."""


class Labels(dict[str, str]):
    """The labels of a series, cleaned, with their text kept for as long as they live.

    Not to be changed: `plus` makes others. A value that is None is no label. What is no valid
    Unicode becomes ``?``.
    """

    __slots__ = ("_named", "text")

    text: str
    """``arch="anvil",device="npu0"``: escaped, in the order in which the labels were given."""

    def __init__(self, **labels: str | None) -> None:
        super().__init__()
        self.text = ""
        self._named: dict[str, Labels] = {}
        self._add(labels)

    def plus(self, **labels: str | None) -> Labels:
        """These and others, whose names are not among these."""
        more = Labels.__new__(Labels)
        more.update(self)
        more.text = self.text
        more._named = {}  # noqa: SLF001 (its own class)
        more._add(labels)  # noqa: SLF001 (its own class)
        return more

    def named(self, label: str) -> Labels:
        """`plus(label=label)`, kept: the sensors and counters of a card stay the same."""
        known = self._named.get(label)
        if known is None:
            if len(self._named) >= _MOST_NAMED:  # a driver that makes up names does not fill memory
                self._named.clear()
            known = self._named[label] = self.plus(label=label)
        return known

    def _add(self, labels: dict[str, str | None]) -> None:
        pieces = [self.text] if self.text else []
        for name, value in labels.items():
            if value is not None:
                self[name] = cleaned = clean(value)
                pieces.append(f'{name}="{_escaped(cleaned)}"')
        self.text = ",".join(pieces)


NONE = Labels()
"""For series that need no label."""

Samples = Iterable[tuple[Labels, float | Histogram | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition(Generic[Source]):
    """A family of metrics: its name, type and help, and how its samples come from a source."""

    name: str
    """As queries spell it, with a counter's ``_total``."""
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    help: str
    """One sentence for people, which names the unit."""
    samples: Callable[[Source], Samples]
    """Samples that are None, not finite, or there already are left out."""

    def metric(self, source: Source) -> Metric:
        """The family with its samples, if `source` has any."""
        name = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        metric = Metric(name, self.help, self.kind)
        seen: set[str] = set()
        for labels, value in self.samples(source):
            if value is None or labels.text in seen:
                continue
            seen.add(labels.text)
            if isinstance(value, Histogram):
                metric.samples += _histogram(name, labels, value)
            elif (number := finite(value)) is not None:
                metric.samples.append(Sample(self.name, labels, number))
        return metric


def render(metric: Metric, *, openmetrics: bool) -> bytes:
    """A family's part of a page; empty if it has no samples. Samples need finite values."""
    if not metric.samples:
        return b""
    # The older format names a counter as its samples are named, the newer one without _total.
    name = metric.name + ("_total" if metric.type == "counter" and not openmetrics else "")
    escaped = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        escaped = escaped.replace('"', r"\"")
    lines = [f"# HELP {name} {escaped}\n# TYPE {name} {metric.type}\n"]
    for sample in metric.samples:
        labels = sample.labels if isinstance(sample.labels, Labels) else Labels(**sample.labels)
        lines.append(
            f"{sample.name}{{{labels.text}}} {sample.value}\n"
            if labels
            else f"{sample.name} {sample.value}\n"
        )
    return "".join(lines).encode()


def clean(value: str) -> str:
    """A text as a label's value: valid Unicode of limited length."""
    if len(value) > LONGEST:
        value = f"{value[: LONGEST - 1]}…"
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def finite(value: float | None) -> float | None:
    """A number that a page can show, else None."""
    if value is None:
        return None
    if isinstance(value, int) and -_EXACT < value < _EXACT:
        return int(value)  # also of a bool
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _histogram(name: str, labels: Labels, seen: Histogram) -> list[Sample]:
    count = 0
    samples = []
    for bound, here in zip((*seen.bounds, math.inf), seen.counts, strict=True):
        count += here
        bucket = labels.plus(le="+Inf" if bound == math.inf else str(float(bound)))
        samples.append(Sample(f"{name}_bucket", bucket, count))
    samples.append(Sample(f"{name}_count", labels, count))
    samples.append(Sample(f"{name}_sum", labels, seen.total))
    return samples


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
