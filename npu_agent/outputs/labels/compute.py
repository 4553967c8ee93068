"""Computes labels: a Snapshot and the machine's name in, keys and values out; reads that name.

Which labels there are is the vendor's (`npu_agent.core.vendor.LabelSet`). Each value is made
of what one or more cards say: see `value` and `_joined`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_agent import files
from npu_agent.core.hardware import Snapshot
from npu_agent.core.vendor import Label, LabelSet, LabelSource
from npu_agent.core.versions import DriverVersion
from npu_agent.logs import logger
from npu_agent.text import natural, quoted

log = logger(__name__)

LONGEST = 63
SIMULATED = "npu-agent/simulated"
"""The key of the one label that is ours, and not the vendor's."""
VENDOR_FILE = "/sys/class/dmi/id/sys_vendor"
NAME_FILE = "/sys/class/dmi/id/product_name"
_LONGEST_DMI = 256
"""Bytes: a few words, and a label has room for 63 characters of them."""
_DEADLINE = 2.0

_OTHER = re.compile(r"[^A-Za-z0-9_.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """DMI texts as read; None where one cannot be read."""

    vendor: str | None
    name: str | None


@dataclass(frozen=True, slots=True)
class Explained:
    """A label, or why there is none."""

    key: str
    value: str | None
    """None: there is no such label now."""
    why: str
    """For people: who says what; without a value, what is missing."""


@dataclass(frozen=True, slots=True)
class _Contribution:
    """The contribution of one card or file to a label."""

    who: str
    text: str | None
    """As yet unsanitised; None: it contributes nothing."""
    because: str
    """Where `text` comes from, or what is missing."""


def value(text: str) -> str | None:
    """Makes a label value of any text; None if there is no ASCII letter or digit in it.

    Each run of characters that label values cannot have becomes one ``-``, together with the dashes
    in it; ``-``, ``_`` and ``.`` are taken off both ends; what is longer than 63 characters is cut,
    and its end trimmed again. A text that is a label value already stays as it is.
    """
    plain = _OTHER.sub(lambda run: run[0] if not run[0].strip("-") else "-", text)
    return plain.strip("-_.")[:LONGEST].rstrip("-_.") or None


def explained(
    snapshot: Snapshot, machine: Machine, sets: Iterable[LabelSet]
) -> tuple[Explained, ...]:
    """Every key of `sets`, sorted, with its value or why not; and `SIMULATED` where it holds."""
    by_key: dict[str, Explained] = {}
    for set_ in sets:
        for label in set_.labels:
            key = set_.prefix + label.key
            by_key[key] = _joined(key, tuple(_contributions(label, snapshot, machine)))
    if simulated := [state.card.name for state in snapshot.cards if state.card.simulated]:
        by_key[SIMULATED] = Explained(SIMULATED, "true", f"{', '.join(simulated)}: simulated")
    return tuple(by_key[key] for key in sorted(by_key))


def labels(snapshot: Snapshot, machine: Machine, sets: Iterable[LabelSet]) -> dict[str, str]:
    """The labels that the Node should have, sorted by key; none where there is no card."""
    return {
        label.key: label.value
        for label in explained(snapshot, machine, sets)
        if label.value is not None
    }


def why_incomplete(snapshot: Snapshot) -> str | None:
    """Why the labels may be wrong now, or None: something that may be a card cannot be read.

    What is on the Node is then better than what would be computed: a card that hangs while the
    agent starts is not gone.
    """
    unread = [f"{odd.entry}: {odd.reason}" for odd in snapshot.skipped if odd.unread]
    return f"an entry that may be a card cannot be read: {'; '.join(unread)}" if unread else None


def _joined(key: str, said: tuple[_Contribution, ...]) -> Explained:
    """Joins the values of several cards: each once, in natural order, by ``_``.

    Whole values that do not fit into 63 characters are left out, the last ones first.
    """
    if not said:
        return Explained(key, None, "there is no card")
    values: set[str] = set()
    reasons: dict[str, list[str]] = {}
    for contribution in said:
        clean = value(contribution.text) if contribution.text is not None else None
        because = contribution.because
        if clean is not None:
            values.add(clean)
        elif contribution.text is not None:
            because += " has no ASCII letter or digit"
        reasons.setdefault(because, []).append(contribution.who)
    kept = sorted(values, key=natural)
    while len("_".join(kept)) > LONGEST:
        kept.pop()
    why = "; ".join(f"{', '.join(who)}: {because}" for because, who in reasons.items())
    if len(kept) < len(values):
        why += f"; {len(values) - len(kept)} of {len(values)} values do not fit"
    return Explained(key, "_".join(kept) or None, why)


def _parts(text: str) -> dict[str, str | None]:
    """A driver's version text, by `Label.part`; fits any text."""
    parsed = DriverVersion.of(text)
    major, minor, patch = parsed.numbers
    return {
        "version": parsed.version,
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": parsed.prerelease,
        "commit": parsed.commit,
    }


def _contributions(label: Label, snapshot: Snapshot, machine: Machine) -> Iterator[_Contribution]:
    """Returns the contributions to a label of cards or a file; none without a card."""
    cards = [state.card for state in snapshot.cards]
    match label.source:
        case LabelSource.COUNT if cards:
            names = ", ".join(card.name for card in cards)
            yield _Contribution(names, str(len(cards)), "installed, healthy or not")
        case LabelSource.FAMILY | LabelSource.PRODUCT as source:
            for card in cards:
                text = card.family if source is LabelSource.FAMILY else card.product
                yield _Contribution(card.name, label.named(text), text)
            for odd in snapshot.skipped:
                family = odd.sample_of
                if label.sample is not None and family is not None:
                    because = f"{family}, an FPGA sample"
                    yield _Contribution(odd.entry, label.sample(family), because)
        case LabelSource.DRIVER:
            for card in cards:
                yield _version(label, card.name, "driver", card.driver_version)
        case LabelSource.FIRMWARE:
            for card in cards:
                yield _version(label, card.name, "firmware", card.firmware_version)
        case LabelSource.MACHINE_VENDOR if cards:
            yield _firmware_text(VENDOR_FILE, machine.vendor)
        case LabelSource.MACHINE_NAME if cards:
            yield _firmware_text(NAME_FILE, machine.name)


def _version(label: Label, who: str, what: str, text: str | None) -> _Contribution:
    if text is None:
        return _Contribution(who, None, f"the driver gives no {what} version")
    part = _parts(text)[label.part]
    missing = "" if part else f" has no {label.part}"
    return _Contribution(who, part or None, quoted(text, LONGEST) + missing)


def _firmware_text(file: str, text: str | None) -> _Contribution:
    if text is None or not text.strip():
        return _Contribution(file, None, "absent or unreadable" if text is None else "empty")
    return _Contribution(file, text, quoted(text.strip(), LONGEST))


async def read_machine(host_root: Path) -> Machine:
    """The machine's vendor and name from /sys/class/dmi/id below `host_root`.

    What is absent or cannot be read is None; bytes that are not UTF-8 become U+FFFD.
    """
    paths = (host_root / file.lstrip("/") for file in (VENDOR_FILE, NAME_FILE))
    vendor, name = await asyncio.gather(*map(_text, paths))
    return Machine(vendor=vendor, name=name)


async def _text(path: Path) -> str | None:
    try:
        return (await files.read(path, _LONGEST_DMI, deadline=_DEADLINE)).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the machine's vendor and name cannot be read", file=path, reason=error)
        return None
