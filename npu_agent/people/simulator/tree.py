"""The simulated driver tree on disk: made, moved on, broken, repaired, and kept alive.

All state is in ROOT/.npu-simulator, so every function here works from any process, on a tree that
is kept alive and on one that is not. It raises SimulatorError if ROOT is not a simulated tree, or
cannot be written.

- `state.json` marks the tree as ours: the cards, their last moment, and their faults. What these
  cards show without faults is ours, and nothing else is ever replaced or removed.
- `lock` is held for each change.

Which ROOT is accepted, so that no file is lost: one that the simulator made before; one that
does not exist or is empty; one with nothing in it but empty directories, what is mounted within
them, and a directory `dev` that is a mount point or has a device `null` as every /dev has (what
lies in there is left alone, and a node that is already there is never taken over).
Never `/`, and never one whose `sys` or `dev` is a symbolic link.

A file is written outside of the tree and renamed into it: a reader sees the old or the new content,
never a part, and a listing never shows a temporary name. Only what changed is written, so that a
file changed by hand stays as it is until the simulator has something new to say in it, or until the
next `make` or fault, which correct every difference.
"""

import asyncio
import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from npu_agent import files
from npu_agent.feed import Feed
from npu_agent.people.simulator import driver
from npu_agent.people.simulator.cards import CardSpec, default_cards, suggest
from npu_agent.people.simulator.families import FAMILIES
from npu_agent.people.simulator.faults import FAULTS, Held, SimulatedCard, given, seen, step
from npu_agent.people.simulator.picture import HOST, Content, Link, Picture, Special
from npu_agent.people.simulator.telemetry import fresh
from npu_agent.text import quoted, reason

STATE_DIR = files.SIMULATION

_Cards = tuple[SimulatedCard, ...]


@dataclass(frozen=True)
class _State:
    cards: _Cards
    plain_nodes: bool
    version: Literal[1] = 1


class SimulatorError(Exception):
    """The tree cannot be made, read or changed; the text says why and what would help."""


def make(root: Path, specs: Sequence[CardSpec], *, plain_nodes: bool = False) -> None:
    """Makes a tree with exactly these cards, or gives an existing one exactly these cards.

    Cards that were there before (same number, same family) keep their readings and faults. With
    `plain_nodes` device nodes are plain files even where character devices could be made.
    """
    with _errors_of(root):
        _refuse_foreign(root)
        _mkdir(root / STATE_DIR)

    def change(cards: _Cards) -> _Cards:
        before = {(card.spec.family, card.spec.index): card for card in cards}
        return tuple(
            replace(before[key], spec=spec)
            if (key := (spec.family, spec.index)) in before
            else SimulatedCard(spec, fresh(spec.family))
            for spec in specs
        )

    _change(root, change, create=True, plain_nodes=plain_nodes)


def show(root: Path, recorded: Picture, directories: Collection[str]) -> None:
    """Makes a new tree that shows what was recorded of a host, with these directories.

    It has no simulated cards: nothing in it changes.
    """
    with _errors_of(root):
        if _state(root).exists():
            raise SimulatorError(f"{root} has a simulated tree; give a new or empty directory")
        _refuse_foreign(root)
        _mkdir(root / STATE_DIR)
    with _locked(root):
        tree = _Tree(root, plain_nodes=False, made=frozenset())
        tree.refuse_taken(recorded)
        tree.save(())
        tree.show(recorded, {}, directories)


def apply_fault(root: Path, npu: str, fault: str) -> None:
    """Does something to a card, by its name, UUID or PCI address; it is on disk when this returns.

    Raises:
        ValueError: there is no such card or fault; suggests one and lists all.
    """
    if fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}{suggest(fault, FAULTS)}")

    def change(cards: _Cards) -> _Cards:
        meant = [npu in (card.spec.name, card.spec.pci_bus_id, card.spec.uuid) for card in cards]
        if not any(meant):
            raise ValueError(f"no card {npu!r}{suggest(npu, [card.spec.name for card in cards])}")
        return tuple(
            given(card, fault) if is_meant else card
            for card, is_meant in zip(cards, meant, strict=True)
        )

    _change(root, change)


def tick(root: Path, dt: float = 1.0, held: Held | None = None) -> None:
    """Moves the readings of all cards on by `dt` seconds, and writes only those that changed.

    With `held` the load is there; without, cards have it in turns.
    """
    _change(root, lambda cards: tuple(step(card, dt, held) for card in cards), repair=False)


def cards(root: Path) -> tuple[SimulatedCard, ...]:
    """The cards of a tree as they are now, also those that are gone; reads only."""
    with _errors_of(root):
        return _load(root).cards


async def simulate(root: Path, held: Feed[Held] | None = None, *, interval: float = 1.0) -> None:
    """Keeps a tree alive: readings move each `interval` seconds, faults that last go on.

    `held` is as `tick` takes it.

    Goes on until cancelled; raises SimulatorError if this is not a simulated tree.
    """
    cards(root)
    last = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now = time.monotonic()
        # On a thread: the demo runs the agent in the same event loop.
        step = asyncio.create_task(
            asyncio.to_thread(tick, root, now - last, held.value if held else None)
        )
        try:
            await asyncio.shield(step)
        finally:
            # The tree may be removed once this is cancelled.
            await asyncio.gather(step, return_exceptions=True)
        last = now


def _change(
    root: Path,
    change: Callable[[_Cards], _Cards],
    *,
    create: bool = False,
    plain_nodes: bool = False,
    repair: bool = True,
) -> None:
    """Loads the cards, changes them, and writes what differs, under the tree's lock.

    With `repair`, that is what differs from what is on disk; else from what the cards showed.
    """
    with _locked(root):
        new = create and not _state(root).exists()
        state = _State((), plain_nodes) if new else _load(root)
        before = state.cards
        after = change(state.cards)
        wanted = _picture(after)
        made = {} if new else _picture([replace(card, faults=()) for card in before])
        tree = _Tree(root, plain_nodes or state.plain_nodes, frozenset(made))
        tree.refuse_taken(wanted)
        tree.save(after)
        known = {} if repair else _picture(before)
        # A card that is swapped for another is out before the other is in, as on a real host.
        specs = {card.spec.index: card.spec for card in before}
        stays = [card for card in after if specs.get(card.spec.index, card.spec) == card.spec]
        bases = {"sys/bus/pci/devices", "dev"}.union(
            *(driver.directories(card.spec.family) for card in after)
        )
        if len(stays) < len(after):
            tree.show(_picture(stays), known, bases)
        tree.show(wanted, known, bases)


def _picture(cards: Sequence[SimulatedCard]) -> Picture:
    return {path: content for tree in (HOST, *map(seen, cards)) for path, content in tree.items()}


@dataclass(frozen=True)
class _Tree:
    """Writes below a root; only under the tree's lock."""

    root: Path
    plain_nodes: bool
    made: frozenset[str]

    def save(self, cards: _Cards) -> None:
        state = _State(cards, self.plain_nodes)
        self._replace(_state(self.root), msgspec.json.encode(state, order="deterministic"))

    def refuse_taken(self, wanted: Picture) -> None:
        """Raises a SimulatorError if a file that we did not make is where we would write."""
        for path in sorted(wanted.keys() - self.made):
            if os.path.lexists(self.root / path):
                raise SimulatorError(
                    f"{self.root / path} is there already, and the simulator did not make it; "
                    "move it away, or give another directory"
                )

    def show(self, wanted: Picture, known: Picture, bases: Collection[str]) -> None:
        """Makes the tree show `wanted`; the directories `bases` stay when they are empty.

        Only what differs from `known` is compared with what is there.
        """
        stale = self.made - wanted.keys()
        new = [path for path in wanted if path not in self.made or known.get(path) != wanted[path]]
        self._refuse_outside({*bases, *(path.rpartition("/")[0] for path in (*stale, *new))})
        for base in sorted(bases):
            _mkdir(self.root / base)
        # Links go first and come last, so that a card is never listed without its files.
        for path in sorted(stale, key=lambda path: not (self.root / path).is_symlink()):
            self._remove(path, bases)
        for path in sorted(new, key=lambda path: isinstance(wanted[path], Link)):
            self._put(path, wanted[path])

    def _refuse_outside(self, directories: Collection[str]) -> None:
        """Raises a SimulatorError if one of these leads out of the root, by .. or by a link.

        The places of cards are from a file that any user may have written.
        """
        root = os.path.realpath(self.root)
        for directory in sorted(directories):
            real = os.path.realpath(self.root / directory)
            if os.path.commonpath((root, real)) != root:
                raise SimulatorError(
                    f"{self.root / directory} is outside of {self.root}: a link, or "
                    f"{_state(self.root)}, was changed; remove {self.root} and make it again"
                )

    def _put(self, path: str, content: Content) -> None:
        target = self.root / path
        if _shows(target, content):
            return
        _mkdir(target.parent)
        if content is Special.NODE:
            _make_node(target, plain=self.plain_nodes)
        else:
            self._replace(target, content)

    def _replace(self, target: Path, content: Content) -> None:
        """Puts content in a place in one step: a reader sees all of the new or of the old."""
        new = self.root / STATE_DIR / "new"  # the lock keeps this name for us
        _discard(new)
        if isinstance(content, Link):
            new.symlink_to(content.target)
        elif content is Special.DIRECTORY:
            new.mkdir()
        elif content is Special.FIFO:
            os.mkfifo(new)
        else:
            new.write_bytes(_data(content))
            new.chmod(0o644)  # under any umask; not 0444 as in /sys: people edit it
        with _released(target):
            if _is_directory(new) or _is_directory(target):
                _discard(target)  # the one change that cannot be made in one step
            new.replace(target)

    def _remove(self, path: str, bases: Collection[str]) -> None:
        target = self.root / path
        with _released(target):
            _discard(target)
        for parent in Path(path).parents[:-2]:  # never the top directory, nor root itself
            if str(parent) in bases:
                break
            try:
                (self.root / parent).rmdir()
            except OSError:  # there is more in it
                break


def _state(root: Path) -> Path:
    return root / STATE_DIR / "state.json"


def _not_simulated(root: Path) -> SimulatorError:
    return SimulatorError(
        f"{root} is not a simulated tree; make one with: "
        f"npu-agent simulate {root} --cards {default_cards()}"
    )


def _load(root: Path) -> _State:
    path = _state(root)
    try:
        state = msgspec.json.decode(path.read_bytes(), type=_State)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_simulated(root) from None
    except ValueError as error:
        raise SimulatorError(
            f"{path} cannot be understood ({error}); if another version of npu-agent made it, "
            f"remove {root} and make it again"
        ) from error
    if unknown := {card.spec.family for card in state.cards} - FAMILIES.keys():
        raise SimulatorError(
            f"{path} has a card of an unknown family, {quoted(min(unknown))}; "
            f"remove {root} and make it again"
        )
    return state


def _refuse_foreign(root: Path) -> None:
    if not root.exists():
        return
    if not root.is_dir():
        raise SimulatorError(f"{root} is not a directory")
    if root.samefile("/"):
        raise SimulatorError("/ is this host itself; give a new or empty directory")
    if _state(root).exists():
        return
    for entry in sorted(root.iterdir()):
        if entry.name == STATE_DIR:
            continue  # a first attempt that was interrupted
        if entry.name == "dev" and _may_be_dev(entry):
            continue
        if _is_unused(entry):
            continue
        raise SimulatorError(
            f"{root} is not empty ({entry.name}) and was not made by npu-agent simulate; "
            "give a new or empty directory"
        )


def _is_unused(path: Path) -> bool:
    """Whether it is a directory with nothing below it but directories and what is mounted there."""
    return _is_directory(path) and all(
        below.is_mount() or _is_unused(below) for below in path.iterdir()
    )


def _may_be_dev(path: Path) -> bool:
    """Whether device nodes may be made here: it is mounted, or some /dev with its null."""
    if path.is_symlink() or not path.is_dir():
        return False
    return path.is_mount() or (path / "null").is_char_device()


@contextmanager
def _errors_of(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot use {root} for a simulated tree: {reason(error)}"
        raise SimulatorError(message) from error


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Holds the tree's lock; `flock` also keeps threads of one process apart."""
    with _errors_of(root):
        for top in ("sys", "dev", STATE_DIR):
            if (root / top).is_symlink():
                raise SimulatorError(
                    f"{root / top} is a symbolic link, and the simulator only writes below its "
                    "root; give a new or empty directory"
                )
        try:
            lock = (root / STATE_DIR / "lock").open("ab")
        except (FileNotFoundError, NotADirectoryError):
            raise _not_simulated(root) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _mkdir(path: Path) -> None:
    """Makes directories like `mkdir -p`, readable by all: the agent may be another user."""
    if path.is_dir():
        return
    _mkdir(path.parent)
    path.mkdir()
    path.chmod(0o755)


def _make_node(path: Path, *, plain: bool) -> None:
    if not plain:
        try:
            # What /dev/null is: it can be opened, read and written, and does nothing.
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            plain = True
    if plain:
        path.touch(exist_ok=False)
    path.chmod(0o666)  # under any umask


def _shows(path: Path, content: Content) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    match content:
        case Special.NODE:
            return True  # what it is made of is not ours to judge
        case Special.FIFO:
            return stat.S_ISFIFO(mode)
        case Special.DIRECTORY:
            return stat.S_ISDIR(mode)
        case Link(target):
            return stat.S_ISLNK(mode) and str(path.readlink()) == target
    return stat.S_ISREG(mode) and path.read_bytes() == _data(content)


def _data(content: Content) -> bytes:
    assert isinstance(content, str | bytes)  # noqa: S101  (for the type checker)
    return content.encode() if isinstance(content, str) else content


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _discard(path: Path) -> None:
    """Removes a file, a link or an empty directory, if it is there."""
    with suppress(FileNotFoundError):
        if _is_directory(path):
            path.rmdir()
        else:
            path.unlink()


@contextmanager
def _released(path: Path) -> Iterator[None]:
    """Gives the readers of a named pipe that is removed the end of the file.

    Otherwise a reader would wait on the unlinked pipe for ever, while a driver that comes to its
    senses answers the reads that hang.
    """
    descriptor = None
    if path.is_fifo() and not path.is_symlink():
        # Read and write: on Linux this never waits. From here on no reader waits to open it.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
