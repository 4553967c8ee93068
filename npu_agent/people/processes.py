"""Which processes have a card's device nodes open, as `fuser` finds them: where no kubelet is."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from npu_agent.core.hardware import CardState


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    command: str
    """Its name, of 15 characters at most, as the kernel has it."""


class Users(NamedTuple):
    """The processes that have cards open."""

    by_card: Mapping[str, Sequence[Process]]
    """By the card's ID, in the order of their numbers."""
    hidden: bool
    """Whether there are processes whose files this user may not see: only root sees all."""


def users(root: Path, cards: Iterable[CardState]) -> Users:
    """Looks for them in the host's /proc; blocking. Opens no device node."""
    owners = {f"/dev/{node}": state.id for state in cards for node in state.card.nodes}
    by_card: dict[str, list[Process]] = defaultdict(list)
    hidden = False
    directories = (path for path in (root / "proc").glob("[0-9]*") if path.name.isdecimal())
    for directory in sorted(directories, key=lambda path: int(path.name)):
        try:
            held = {owners[name] for name in _open_files(directory / "fd") if name in owners}
            if not held:
                continue
            command = (directory / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except PermissionError:
            hidden = True
            continue
        except OSError:
            continue  # it has ended
        for id_ in held:
            by_card[id_].append(Process(int(directory.name), command))
    return Users(by_card, hidden)


def _open_files(directory: Path) -> Iterator[str]:
    for link in directory.iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            yield os.readlink(link)  # noqa: PTH115 (a name, not a path)
