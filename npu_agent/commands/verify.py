"""`npu-agent verify`: whether this container has the NPUs that it was granted, and no others.

What a container is granted is computed by `npu_agent.core.offer`, as the agent does it: so the two
cannot differ.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from npu_agent.commands import FAILED
from npu_agent.commands.common import host_root, quiet
from npu_agent.core.hardware import CardState, CoreRange, Health, Snapshot, State
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.doctor import report
from npu_agent.doctor.check import Check
from npu_agent.doctor.check import State as Found
from npu_agent.files import is_device
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.vendors.furiosa.families import FAMILIES, Family

_DEADLINE = 5.0
"""Seconds that a node may take to be opened. A good one takes microseconds."""

_FORMS = {
    "NPU_DEVNAME": (re.compile(r"npu([0-9]{1,4})pe([0-9]{1,2})(?:-([0-9]{1,2}))?"), "npu0pe0-1"),
    "FURIOSA_DEVICES": (
        re.compile(r"npu:([0-9]{1,4}):([0-9]{1,2})(?:-([0-9]{1,2}))?"),
        "npu:0:0-1",
    ),
}
"""For each variable, the form of its items and an example; npu_agent/core/offer.py."""

_TAMPERED = "the agent sets both: does the Pod's spec or the image's start script overwrite one?"


@dataclass(frozen=True, slots=True, order=True)
class Named:
    """Cores of a card, as the environment names them; the family is not in the name."""

    index: int
    cores: CoreRange

    def __str__(self) -> str:
        return f"npu{self.index}pe{self.cores}"


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is wrong."""
    quiet(args)
    checks = asyncio.run(verify(host_root(args), os.environ, expect=args.expect))
    print(report.as_json(checks) if args.format == "json" else text(checks))
    return FAILED if report.failed(checks) else 0


async def verify(
    root: Path, environ: Mapping[str, str], *, expect: int | None = None
) -> tuple[Check, ...]:
    """Checks this container; one line for each finding.

    Args:
        root: below which /dev is.
        environ: the container's environment.
        expect: how many devices the container asked for; None: as many as are named. All cores of
            a card may have been one device or several: the names do not tell, and either is good.
    """
    named, checks = promised(environ)
    there = present(root)
    granted: list[Device] = []
    for index in sorted({one.index for one in named}):
        cores = [one.cores for one in named if one.index == index]
        families = [family for family, number in there if number == index]
        if not families:
            checks.append(_wrong(f"npu{index}", "none of its nodes is in /dev", _NOT_GIVEN))
        for name in families:
            found, left = devices_of(FAMILIES[name], index, cores)
            granted += found
            checks += (
                _wrong(
                    f"npu{index}pe{cores}", f"{FAMILIES[name].title} has no such cores", _TAMPERED
                )
                for cores in left
            )
    # Cards at a time, but the nodes of a card one by one: an open PE node makes others busy.
    cards: dict[tuple[str, int], list[Device]] = {}
    for device in granted:
        cards.setdefault((device.family, device.order[0]), []).append(device)
    if expect is not None and named:
        checks.append(_expected(expect, _fewest(cards), len(named)))
    for lines in await asyncio.gather(*(_card(root, *key, own) for key, own in cards.items())):
        checks += lines
    checks.append(_others(there, granted, named))
    return tuple(checks)


def promised(environ: Mapping[str, str]) -> tuple[tuple[Named, ...], list[Check]]:
    """What the environment promises, and the lines on the environment itself."""
    lists: dict[str, tuple[Named, ...]] = {}
    checks = []
    for variable, (form, example) in _FORMS.items():
        text = environ.get(variable)
        if not text:
            what = "is empty" if text == "" else "is not set"
            checks.append(
                _wrong(
                    variable,
                    f"{what}: this container was given no NPU",
                    "ask for one in resources.limits of this very container (not only of another "
                    "one of the Pod)",
                )
            )
            continue
        items = [(item, form.fullmatch(item)) for item in text.split(",")]
        if bad := [item for item, match in items if match is None]:
            checks.append(
                _wrong(variable, f"{bad[0]!r} in {text!r} has not the form {example}", _TAMPERED)
            )
            continue
        lists[variable] = tuple(
            Named(int(match[1]), CoreRange(int(match[2]), int(match[3] or match[2])))
            for _, match in items
            if match
        )
    if checks:
        return next(iter(lists.values()), ()), checks
    named, other = lists.values()
    said = " and ".join(f"{variable}={environ[variable]}" for variable in _FORMS)
    twice = [
        f"{one} and {two}"
        for at, one in enumerate(named)
        for two in named[at + 1 :]
        if one.index == two.index and one.cores.overlaps(two.cores)
    ]
    if named != other:
        return named, [_wrong("environment", f"{said} name different cores", _TAMPERED)]
    if twice:
        return named, [_wrong("environment", f"{twice[0]} overlap", _TAMPERED)]
    return named, [Check("environment", Found.OK, said)]


def present(root: Path) -> dict[tuple[str, int], frozenset[str]]:
    """For each card of which there are nodes in /dev, by family and number: these nodes."""
    found: dict[tuple[str, int], set[str]] = {}
    for family in FAMILIES.values():
        try:
            names = os.listdir(root / "dev" / family.dev_dir)  # noqa: PTH208 (names are wanted)
        except OSError:
            continue
        for name in names:
            match = re.match("npu([0-9]{1,4})", name)
            node = family.dev_dir + name
            if match and node in family.nodes(int(match[1])):
                found.setdefault((family.name, int(match[1])), set()).add(node)
    return {key: frozenset(nodes) for key, nodes in found.items()}


def devices_of(
    family: Family, index: int, cores: Iterable[CoreRange]
) -> tuple[list[Device], list[CoreRange]]:
    """The devices that the agent names by exactly these cores; and the cores of none.

    A whole RNGD and its two halves have the same names and the same nodes: either will do.
    """
    left = list(cores)
    found = []
    for device in _possible(family, index):
        names = dict(device.environment)["NPU_DEVNAME"]
        parts = [part for part in left if f"npu{index}pe{part}" in names]
        if len(parts) == len(names):
            found.append(device)
            left = [part for part in left if part not in parts]
    return found, left


def _possible(family: Family, index: int) -> list[Device]:
    """Every device that the agent could make of such a card."""
    card = family.card(index, product=family.name, nodes=frozenset(family.nodes(index)))
    health = Health(state=State.HEALTHY, reason="", since=0.0)
    snapshot = Snapshot((CardState(id=card.name, card=card, health=health),), complete=True)
    return [
        device
        for width in family.widths
        for device in advertise(snapshot, Resource(name="", widths=((family.name, width),)))
    ]


def _fewest(cards: Mapping[tuple[str, int], list[Device]]) -> int:
    """How few devices these can be: all cores of a card can be one, whatever nodes name them."""
    return sum(
        1 if sum(len(one.cores) for one in own) == FAMILIES[name].core_count else len(own)
        for (name, _), own in cards.items()
    )


def _expected(expect: int, fewest: int, most: int) -> Check:
    if fewest <= expect <= most:
        return Check("devices", Found.OK, f"{expect}, as expected")
    count = str(fewest) if fewest == most else f"{fewest} to {most}"
    return _wrong(
        "devices",
        f"{count} given, {expect} expected",
        "does the Pod's resources.limits ask for as many as --expect says?",
    )


async def _card(root: Path, name: str, index: int, devices: list[Device]) -> list[Check]:
    """Opens each promised node of a card once."""
    nodes = list(dict.fromkeys(node for device in devices for node in device.nodes))
    wrong: list[Check] = []
    with closing(Reader(f"npu-open-{name}-{index}")) as reader:
        for at, node in enumerate(nodes):
            try:
                await reader.call(partial(_open, root / "dev" / node, root), deadline=_DEADLINE)
            except HungError as error:
                rest = len(nodes) - at - 1
                untried = f" ({rest} more of the card were not tried)" if rest else ""
                wrong.append(
                    _wrong(
                        f"/dev/{node}",
                        f"cannot be opened: {error}{untried}",
                        "the card or its driver hangs: dmesg on the node, and give the card a "
                        "rest by disabledDevices",
                    )
                )
                break
            except OSError as error:
                wrong.append(_wrong(f"/dev/{node}", *_explained(error)))
    if wrong:
        return wrong
    return [
        Check(
            f"npu{index}",
            Found.OK,
            f"{FAMILIES[name].title}: {len(nodes)} device nodes, each one opens for reading and "
            "writing",
        )
    ]


class _NoDeviceError(OSError):
    """What stands there is no device node."""


def _open(path: Path, root: Path) -> None:
    """On a thread: opens and closes it."""
    if not is_device(path, root):
        raise _NoDeviceError
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))


_DRAINED = "the driver was unloaded, or the card drained, since the Pod began: make the Pod anew"
_NOT_GIVEN = (
    "the container runtime has not made them: look at its log on the node; with allocation.method "
    "cdi, is CDI on in the runtime?"
)


_REMEDIES: dict[int | None, tuple[str, str]] = {
    errno.ENOENT: ("missing", f"if the node's /dev has it: {_NOT_GIVEN}; if not: its driver"),
    errno.EBUSY: (
        "in use (EBUSY)",
        (
            "a process of this container has it open, or one of another that should not: "
            "`fuser -v` on the node tells which"
        ),
    ),
    errno.EPERM: (
        "not permitted (EPERM)",
        (
            "it is there, and the container's device cgroup does not let it be opened: it was not "
            "given by the kubelet; is /dev mounted from the host?"
        ),
    ),
    errno.EACCES: (
        "not for this user (EACCES)",
        "runAsUser: 0, or device_ownership_from_security_context in the container runtime",
    ),
    errno.ENXIO: ("no device is behind it (ENXIO)", _DRAINED),
    errno.ENODEV: ("no device is behind it (ENODEV)", _DRAINED),
}
"""What an error of opening means, and the remedy."""


def _explained(error: OSError) -> tuple[str, str]:
    if isinstance(error, _NoDeviceError):
        return (
            "is no character device",
            "something in the image or a volume stands where the node belongs: take it away",
        )
    return _REMEDIES.get(error.errno) or (
        f"cannot be opened: {error.strerror or error}",
        "look at dmesg on the node, and at `npu-agent info` there",
    )


def _others(
    there: Mapping[tuple[str, int], frozenset[str]],
    granted: Iterable[Device],
    named: Iterable[Named],
) -> Check:
    """Whether there are nodes in /dev of cards, or of cores, that were not promised."""
    held = {one.order[:2]: set[int]() for one in granted}
    for one in named:
        for (index, _), cores in held.items():
            if index == one.index:
                cores.update(one.cores)
    strange = []
    for (name, index), nodes in there.items():
        mine = held.get((index, name), set())
        allowed = {
            node
            for device in _possible(FAMILIES[name], index)
            if mine.issuperset(device.cores)
            for node in device.nodes
        }
        strange += sorted(nodes - allowed)
    if not strange:
        return Check("/dev", Found.OK, "nothing of other cards or cores")
    shown = ", ".join(f"/dev/{node}" for node in strange[:3])
    more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
    return _wrong(
        "/dev",
        f"this container sees more than it was given: {shown}{more}",
        "no `privileged: true` and no hostPath of /dev in the Pod: they give it every card of "
        "the node",
    )


def _wrong(name: str, detail: str, remedy: str) -> Check:
    return Check(name, Found.WRONG, detail, remedy)


def text(checks: Iterable[Check]) -> str:
    """A line for each, as `npu-agent verify` prints them."""
    return "\n".join(
        f"{'ok  ' if one.state is Found.OK else 'FAIL'}  {one.name}: {one.detail}"
        + (f"; {one.remedy}" if one.remedy else "")
        for one in checks
    )
