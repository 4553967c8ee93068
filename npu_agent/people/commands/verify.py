"""`npu-agent verify`: whether a job can run in this container, on the NPUs that it was granted.

What a container is granted is computed by `npu_agent.core.offer`, as the agent does it: so the two
cannot differ. Whether the kernel lets a job use it is tried, as only the container itself can.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from npu_agent.cli import FAILED, WRONG, CommandError, host_root
from npu_agent.core.hardware import Card, CardState, Cause, CoreRange, Health, HealthState, Snapshot
from npu_agent.core.health import Policy
from npu_agent.core.offer import Device, Resource, advertise, cover
from npu_agent.files import is_device
from npu_agent.inventory.card import ProbeSettings
from npu_agent.people import iouring
from npu_agent.people.cards import at_one_moment, read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import quiet
from npu_agent.people.doctor.check import Check, State, failed
from npu_agent.text import listed
from npu_agent.threads import DaemonThread
from npu_agent.vendors import PROFILE, SPEC, VENDOR
from npu_agent.wording import ENGLISH

_OVERWRITTEN = "check whether the Pod's spec or the image's start script overwrites it"
_NOT_GIVEN = (
    "check the container runtime's log on the node: it has not made them; with allocation.method "
    "cdi, check that CDI is on in the runtime"
)


_OUTSIDE = (
    "this is no container with an NPU: {variables} are not set. verify shows whether a job can run "
    "where it would run: put it into a Pod that requests an NPU, as in k8s/verify.gotmpl. On a "
    "node, `npu-agent doctor` checks the agent"
)

Named = tuple[int, CoreRange]
"""Number of a card and some of its cores, as the environment names them, without the family."""


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if a job could not run as it is, 2 outside of a container with NPUs."""
    policy = quiet(args).health.policy
    variables = [name for name, _ in PROFILE.environment]
    if args.expect is None and not any(os.environ.get(name) for name in variables):
        raise CommandError(_OUTSIDE.format(variables=" and ".join(variables)), WRONG)
    checks = asyncio.run(verify(host_root(args), os.environ, policy, expect=args.expect))
    if view.is_data(args):
        print(view.data([check.as_json() for check in checks], args))
    else:
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            print(f"{check.state.value:5}  {check.name}: {check.detail}{remedy}")
    return FAILED if failed(checks) else 0


async def verify(
    root: Path,
    environ: Mapping[str, str],
    policy: Policy,
    *,
    expect: int | None = None,
    deadline: float = 5.0,
) -> tuple[Check, ...]:
    """Checks this container; one line for each finding.

    `expect` is how many devices it asked for; None: as many as are named. All cores of a card may
    have been one device or several: the names do not show it, either is good. A node may take
    `deadline` seconds to be opened; a good one takes microseconds.
    """
    granted: dict[Card, list[Device]] = {}
    cards = VENDOR(root).given()
    named, checks = promised(environ)
    for index in sorted({number for number, _ in named}):
        mine = [card for card in cards if card.index == index]
        if not mine:
            checks.append(_wrong(f"npu{index}", "none of its nodes is in /dev", _NOT_GIVEN))
        for card in mine:
            cores = [cores for number, cores in named if number == index]
            granted[card], left = devices_of(card, cores)
            detail = f"{card.title} has no such cores"
            checks += (_wrong(f"{card.name}pe{part}", detail, _OVERWRITTEN) for part in left)
    if expect is not None and named:
        checks.append(_expected(expect, granted, len(named)))
    # Several cards together, but the nodes of each one by one: an open PE node makes others busy.
    opened = await asyncio.gather(
        *(_opened(root, card, devices, deadline) for card, devices in granted.items() if devices)
    )
    for lines in opened:
        checks += lines
    checks += await _judged(root, granted, policy)
    checks.append(_others(cards, granted))
    checks += _beyond_cards(root, {card.family for card in granted})
    return tuple(checks)


def _beyond_cards(root: Path, families: set[str]) -> Iterator[Check]:
    """What jobs on cards of these families need, and no device node of a card gives."""
    if families.isdisjoint(PROFILE.io_uring):
        return
    yield iouring.verdict(root)
    for node, users in PROFILE.host_nodes:
        name = f"/dev/{node}"
        try:
            _open(root / "dev" / node, root)
        except OSError as error:
            detail = f"{error.strerror or 'is not a character device'}: {users}"
            remedy = (
                "if this job is one: who installed the agent sets "
                f"`containers: {{deviceNodes: [{name}]}}` in its config"
            )
            yield Check(name, State.NOTE, detail, remedy)
        else:
            yield Check(name, State.OK, "opens for reading and writing")


def promised(environ: Mapping[str, str]) -> tuple[list[Named], list[Check]]:
    """Returns the cores that the environment names, and findings."""
    lists: dict[str, list[Named]] = {}
    checks = []
    for variable, form in PROFILE.environment:
        value = environ.get(variable, "")
        wholes = [
            (text, cores) for name, text, cores in PROFILE.whole_environment if name == variable
        ]
        items = [_named(item, form, wholes) for item in value.split(",")]
        if not value:
            remedy = (
                "add an NPU to this container's `resources.limits` (another container's limits "
                "do not count)"
            )
            checks.append(_wrong(variable, "is not set: this container has no NPU", remedy))
        elif None in items:
            forms = " or ".join(text.format(n=0, cores="0-1") for text in (form, *dict(wholes)))
            checks.append(_wrong(variable, f"{value!r} has not the form {forms}", _OVERWRITTEN))
        else:
            lists[variable] = [item for item in items if item]
    named = next(iter(lists.values()), [])
    if not checks:
        values = " and ".join(f"{variable}={environ[variable]}" for variable in lists)
        checks.append(Check("environment", State.OK, values))
        if any(_cores(other) != _cores(named) for other in lists.values()):
            checks = [_wrong("environment", f"{values} name different cores", _OVERWRITTEN)]
    return named, checks


def _named(item: str, form: str, wholes: Iterable[tuple[str, CoreRange]]) -> Named | None:
    """What an item of a variable names: a range of cores, or a whole card; None: nothing."""
    if match := _pattern(form).fullmatch(item):
        first = int(match["first"])
        return int(match["n"]), CoreRange(first, int(match["last"] or first))
    for text, cores in wholes:
        if match := _pattern(text).fullmatch(item):
            return int(match["n"]), cores
    return None


def _pattern(form: str) -> re.Pattern[str]:
    pattern = re.escape(form).replace(re.escape("{n}"), "(?P<n>[0-9]{1,4})")
    cores = "(?P<first>[0-9]{1,2})(?:-(?P<last>[0-9]{1,2}))?"
    return re.compile(pattern.replace(re.escape("{cores}"), cores))


def _cores(named: Iterable[Named]) -> set[tuple[int, int]]:
    """Number and core of each; one variable may name as a card what another names by its nodes."""
    return {(number, core) for number, cores in named for core in cores}


def devices_of(card: Card, cores: Iterable[CoreRange]) -> tuple[list[Device], list[CoreRange]]:
    """The devices that the agent names by exactly these cores; and the cores of none.

    A whole card without a node for all of its cores and its two halves have the same names and the
    same nodes: either will do.
    """
    left = list(cores)
    devices = []
    for device in _possible(card):
        names, _ = cover(device.card, device.cores)
        if all(part in left for part in names):
            devices.append(device)
            left = [part for part in left if part not in names]
    return devices, left


def _possible(card: Card) -> list[Device]:
    """Every device that the agent could make of such a card if it had all of its nodes."""
    whole = replace(card, nodes=card.nodes | frozenset(card.access.required_nodes))
    health = Health(state=HealthState.HEALTHY, reason="", since=0.0)
    snapshot = Snapshot((CardState(id=card.name, card=whole, health=health),), complete=True)
    return [
        device
        for width in SPEC.families[card.family]
        for device in advertise(snapshot, Resource(name="", widths=((card.family, width),)))
    ]


def _expected(expect: int, granted: Mapping[Card, list[Device]], most: int) -> Check:
    # All cores of a card can be one device, however many nodes name them.
    fewest = sum(
        1 if sum(len(device.cores) for device in devices) == card.core_count else len(devices)
        for card, devices in granted.items()
    )
    if fewest <= expect <= most:
        return Check("devices", State.OK, f"{expect}, as expected")
    count = str(fewest) if fewest == most else f"{fewest} to {most}"
    remedy = "check that the Pod's resources.limits requests as many as --expect says"
    return _wrong("devices", f"{count} given, {expect} expected", remedy)


async def _opened(root: Path, card: Card, devices: list[Device], deadline: float) -> list[Check]:
    """Opens each promised node of a card once."""
    nodes = list(dict.fromkeys(node for device in devices for node in device.nodes))
    failures: list[Check] = []
    thread = DaemonThread()
    for node in nodes:
        try:
            await thread.call(partial(_open, root / "dev" / node, root), deadline=deadline)
        except TimeoutError as error:
            what = f"cannot be opened: {error.strerror}; the card's others were not tried"
            remedy = f"{ENGLISH.of_cause(Cause.HANGS).remedy}; until then cordon the card"
            failures.append(_wrong(f"/dev/{node}", what, remedy))
            break
        except OSError as error:
            if error.errno == errno.EACCES and _has_user_namespace(root):
                failures.append(_wrong(card.name, *_IN_A_USER_NAMESPACE))
                break
            what = f"cannot be opened: {error.strerror or error}"
            other = (what, "check dmesg and `npu-agent info` on the node")
            failures.append(_wrong(f"/dev/{node}", *_REMEDIES.get(error.errno, other)))
    detail = f"{card.title}: {len(nodes)} device nodes, each one opens for reading and writing"
    checks = failures or [Check(card.name, State.OK, detail)]
    return [replace(check, section=card.name) for check in checks]


async def _judged(root: Path, granted: Iterable[Card], policy: Policy) -> list[Check]:
    """What the driver shows of these cards in /sys, judged as by the agent.

    Nodes are not judged: those of other containers are not here.
    """
    mine = {card.key for card in granted}
    snapshot = await read_once(VENDOR(root), settings=ProbeSettings(policy=policy))
    lasting = view.described(at_one_moment(snapshot, policy))
    checks: list[Check] = []
    for state in snapshot.cards:
        if state.card.key not in mine:
            continue
        name = f"{state.card.name} health"
        health = state.health
        if health.state is HealthState.UNHEALTHY and health.cause is not Cause.NODES:
            remedy = "create the Pod again: it gets another card, if one is free"
            checks.append(_wrong(name, f"unhealthy: {ENGLISH.reason(health)}", remedy))
        elif texts := lasting.get(state.id):
            checks.append(Check(name, State.NOTE, "; ".join(texts)))
    return checks


def _open(path: Path, root: Path) -> None:
    if not is_device(path, root):
        raise OSError  # without a number
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))


def _has_user_namespace(root: Path) -> bool:
    """Whether this process has other users than the host: with hostUsers: false."""
    try:
        fields = (root / "proc/self/uid_map").read_text("ascii").split()
    except (OSError, ValueError):
        return False
    return fields[:2] != ["0", "0"]


_IN_A_USER_NAMESPACE = (
    "its device nodes are not for the users of this Pod, which has a user namespace (EACCES)",
    "hostUsers: true in the Pod's spec, or a udev rule on the host: mode 0666 for the nodes",
)
_DRAINED = "create the Pod again: the driver was unloaded, or the card drained, since the Pod began"
_REMEDIES = {
    None: (
        "is not a character device",
        "remove the file of the image or volume that is in the node's place",
    ),
    errno.ENOENT: (
        "missing (ENOENT)",
        f"if the node's /dev has it: {_NOT_GIVEN}; if not: its driver",
    ),
    errno.EBUSY: (
        "in use (EBUSY)",
        "find the process that has it open, here or in another container: `fuser -v` on the node",
    ),
    errno.EPERM: (
        "not permitted (EPERM)",
        "remove a hostPath mount of /dev from the Pod: the kubelet has not granted this device",
    ),
    errno.EACCES: (
        "not for this user (EACCES)",
        "runAsUser: 0, or device_ownership_from_security_context in the container runtime",
    ),
    errno.ENXIO: ("no device is behind it (ENXIO)", _DRAINED),
    errno.ENODEV: ("no device is behind it (ENODEV)", _DRAINED),
}
"""What an error of opening means, and the remedy; None: there is a file of another type."""


def _others(cards: Iterable[Card], granted: Mapping[Card, list[Device]]) -> Check:
    """Whether there are nodes in /dev of cards, or of cores, that were not promised."""
    strange: list[str] = []
    for card in cards:
        mine = {core for device in granted.get(card, ()) for core in device.cores}
        possible = (device for device in _possible(card) if mine.issuperset(device.cores))
        strange += sorted(card.nodes.difference(*(device.nodes for device in possible)))
    if not strange:
        return Check("/dev", State.OK, "nothing of other cards or cores")
    names = listed((f"/dev/{node}" for node in strange), 3)
    return _wrong(
        "/dev",
        f"this container sees more devices than it was granted: {names}",
        "remove `privileged: true` and hostPath mounts of /dev from the Pod: they expose every "
        "card of the node",
    )


def _wrong(name: str, detail: str, remedy: str) -> Check:
    return Check(name, State.WRONG, detail, remedy)
