"""Acme: cards of the family Anvil, which their driver lists in /sys/class/anvil."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, ClassVar

from npu_agent.core.hardware import (
    Access,
    Card,
    CoreRange,
    CoreReading,
    Reading,
    Sensor,
    SensorKind,
)
from npu_agent.core.vendor import (
    Entry,
    KernelDriver,
    Label,
    LabelSet,
    LabelSource,
    MetricName,
    MetricSchema,
    MetricSource,
    NotServedError,
    Probe,
    Profile,
    VendorSpec,
)

_LABELS = LabelSet(
    about="Acme",
    families={"anvil"},
    prefix="acme.example/",
    labels=(
        Label(key="anvil.count", source=LabelSource.COUNT),
        Label(key="driver.version", source=LabelSource.DRIVER),
    ),
)
_METRICS = MetricSchema(
    about="°C",
    families={"anvil"},
    metrics=(
        MetricName(
            name="acme_temperature",
            help="The temperature in °C, by sensor (label).",
            source=MetricSource.SENSORS,
            sensors=SensorKind.TEMPERATURE,
            per_unit=1_000,
        ),
        MetricName(
            name="acme_health",
            help="The health of the card: 1 for the state that it is in, 0 for the others.",
            source=MetricSource.HEALTH,
        ),
        MetricName(
            name="acme_assigned",
            help="The container that holds cores of the card; always 1.",
            source=MetricSource.ASSIGNED,
        ),
    ),
    renamed={},
)
_ENVIRONMENT = (("ANVIL_CORES", "{n}:{cores}"),)
_CDI_KIND = "acme.example/anvil"


class Acme:
    """Acme's cards on one host: a `npu_agent.core.vendor.Vendor`, which explains the verbs."""

    spec: ClassVar[VendorSpec] = VendorSpec(
        families={"anvil": (1, 2)},
        resource_name="acme.example/anvil",
        socket_name="acme-anvil",
        label_sets={"acme": _LABELS},
        label_set="acme",
        metric_schemas={"acme": _METRICS},
        metric_schema="acme",
    )
    profile: ClassVar[Profile] = Profile(
        title="Acme",
        pci=None,
        plugins="acme",
        drivers=(KernelDriver(family="anvil", title="Acme Anvil", directory="sys/class/anvil"),),
        nodes=("anvil*",),
        identities=("serial",),
        files=("uuid", "version", "alive", "temperature"),
        environment=_ENVIRONMENT,
        cdi_kinds=(_CDI_KIND,),
    )

    def __init__(self, root: Path, *, simulated: bool = False) -> None:
        """`root` is where the host's ``/`` is seen."""
        self._simulated = simulated
        self.place = str(root / "sys/class/anvil")
        self._dev = root / "dev"

    def scan(self) -> tuple[Entry, ...]:
        """See `Vendor.scan`."""
        here = Path(self.place)
        found = sorted(here.iterdir()) if here.is_dir() else []
        return tuple(
            Entry(
                family="anvil",
                index=int(path.name.removeprefix("anvil")),
                path=str(path),
                inode=path.stat().st_ino,
                counters_wrap=False,
            )
            for path in found
        )

    def identify(self, entry: Entry) -> Card:
        """See `Vendor.identify`."""
        uuid = Path(entry.path, "uuid").read_text("utf-8").strip()
        if not uuid:
            raise NotServedError("uuid is empty: no Anvil has that")
        return _card(
            entry.index,
            uuid=uuid,
            driver_version=Path(entry.path, "version").read_text("utf-8").strip(),
            nodes=self._nodes(entry.index),
            simulated=self._simulated,
        )

    def probe(self, entry: Entry) -> Probe:
        """See `Vendor.probe`."""
        said = Path(entry.path, "alive").read_text("utf-8").strip()
        if said not in ("0", "1"):
            raise ValueError(f"alive says {said[:20]!r}")
        return Probe(said == "1", f"alive says {said}", self._nodes(entry.index))

    def read(self, entry: Entry, card: Card) -> Reading:  # noqa: ARG002 (one shape for all)
        """See `Vendor.read`."""
        heat = int(Path(entry.path, "temperature").read_text("utf-8"))
        return Reading(
            at=time.monotonic(),
            sensors=(Sensor(SensorKind.TEMPERATURE, "chip", heat),),
            cores=self.read_cores(entry),
        )

    def read_cores(self, entry: Entry) -> tuple[CoreReading, ...]:  # noqa: ARG002 (the driver says nothing)
        """See `Vendor.read_cores`."""
        return ()

    def pci_addresses(self) -> frozenset[str]:
        """See `Vendor.pci_addresses`."""
        return frozenset()

    def given(self) -> tuple[Card, ...]:
        """See `Vendor.given`."""
        names = (re.fullmatch("anvil([0-9]+)", path.name) for path in self._dev.glob("anvil*"))
        numbers = sorted(int(match[1]) for match in names if match)
        return tuple(_card(number, nodes=self._nodes(number)) for number in numbers)

    def _nodes(self, index: int) -> frozenset[str]:
        """The nodes that exist; never opened, as that may take the card."""
        nodes = _access(index).nodes()
        return frozenset(node for node in nodes if (self._dev / node).exists())


def _card(index: int, **facts: Any) -> Card:
    """Card `index`; `facts` are further fields of `Card`."""
    return Card(
        vendor="acme",
        family="anvil",
        title="Acme Anvil",
        core_count=2,
        access=_access(index),
        index=index,
        product="anvil",
        **facts,
    )


def _access(index: int) -> Access:
    """How containers are given card `index`."""
    return Access(
        shared_nodes=(f"anvil{index}",),
        whole_nodes=(),
        core_nodes=tuple((CoreRange(core, core), f"anvil{index}c{core}") for core in range(2)),
        environment=tuple((name, form.replace("{n}", str(index))) for name, form in _ENVIRONMENT),
        cdi_kind=_CDI_KIND,
    )
