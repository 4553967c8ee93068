"""The simulated driver tree on disk: made, moved on, broken, repaired, and kept alive.

All state is in ROOT/.npu-simulator, so every function here works from any process, on a tree that
is kept alive and on one that is not:

- `state.json`: the cards, their last moment and their faults. It marks the tree as ours.
- `paths.json`: every file, link and node that we made. Nothing else is ever replaced or removed.
- `lock` is held for each change, `alive` by the process that keeps the tree alive.

Which ROOT is accepted, so that nobody loses a file: one that the simulator made before; one that
does not exist or is empty; one with nothing in it but empty directories and a directory `dev` that
is a mount point or has a device `null` as every /dev has (what lies in there is left alone, and a
node that is already there is never taken over).
Never `/`, and never one whose `sys` or `dev` is a symbolic link.

A file is written beside the tree and renamed into it: a reader sees the old or the new content,
never a part, and a listing never shows a temporary name. Only what changed is written, so that a
file changed by hand stays as it is until the simulator has something new to say in it, or until the
next `make` or fault, which put right whatever differs.
"""

import asyncio
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from npu_agent import files
from npu_agent.simulator.cards import CardSpec, default_cards
from npu_agent.simulator.faults import FAULTS, SimulatedCard, find_fault, seen
from npu_agent.simulator.picture import Content, Picture, Special, host, merge
from npu_agent.simulator.telemetry import CardTelemetry, advance, fresh
from npu_agent.text import closest, reason

STATE_DIR = files.SIMULATION

_Cards = tuple[SimulatedCard, ...]


class SimulatorError(Exception):
    """The tree cannot be made, read or changed; the text says why and what would help."""


def make(root: Path, specs: Sequence[CardSpec], *, plain_nodes: bool = False) -> None:
    """Makes a tree with exactly these cards, or gives an existing one exactly these cards.

    Cards that were there before (same number, same family) keep their readings and faults.

    Args:
        root: its root directory; made if it is missing.
        specs: the cards.
        plain_nodes: plain files as device nodes even where character devices could be made.

    Raises:
        SimulatorError: root is not ours, or cannot be written.
        ValueError: two of the cards have the same number or PCI address.
    """
    for what in ("name", "pci_bus_id"):
        values = [getattr(spec, what) for spec in specs]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"two cards have the same {what}: {', '.join(twice)}")
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

    _Tree(root, plain_nodes=plain_nodes).change(change, create=True)


def apply_fault(root: Path, card: str, fault: str) -> None:
    """Does something to a card; it is on disk when this returns.

    Args:
        root: a tree, kept alive or not.
        card: its name, such as `npu0`, its UUID or its PCI address.
        fault: a key of `npu_agent.simulator.FAULTS`.

    Raises:
        SimulatorError: root is no simulated tree, or cannot be written.
        ValueError: there is no such card or fault; suggests one and lists all.
    """
    found = find_fault(fault)

    def change(cards: _Cards) -> _Cards:
        broken = _find(cards, card)
        return tuple(found.give(one) if one is broken else one for one in cards)

    _Tree(root).change(change)


def tick(root: Path, dt: float = 1.0) -> None:
    """Moves the readings of all cards on by `dt` seconds.

    Raises:
        SimulatorError: root is no simulated tree, or cannot be written.
    """
    _Tree(root).change(lambda cards: _advanced(cards, dt))


def cards(root: Path) -> tuple[SimulatedCard, ...]:
    """The cards of a tree as they are now, also those that are gone; reads only.

    Raises:
        SimulatorError: root is no simulated tree.
    """
    with _errors_of(root):
        return _load(root)[0]


def living(root: Path) -> bool:
    """Whether a process keeps this tree alive at this moment.

    Raises:
        SimulatorError: the tree cannot be read.
    """
    path = root / STATE_DIR / "alive"
    with _errors_of(root):
        if not path.exists():
            return False
        # Under the tree's lock: a simulator that starts now must not take this for a rival.
        with _locked(root), path.open() as alive:
            return not _try_lock(alive.fileno())


class Simulation:
    """Keeps a tree alive: readings move, faults that last go on.

    Args:
        root: a tree that `make` made.
        interval: seconds between two steps.
    """

    def __init__(self, root: Path, interval: float = 1.0) -> None:
        self._tree = _Tree(root)
        self._interval = interval

    async def run(self) -> None:
        """Goes on until it is cancelled.

        Raises:
            SimulatorError: another process keeps this tree alive, or it vanished.
        """
        cards(self._tree.root)  # says so now if this is no simulated tree
        with _alone(self._tree.root):
            last = time.monotonic()
            while True:
                await asyncio.sleep(self._interval)
                now = time.monotonic()
                # On a thread: the demo runs the agent in the same event loop.
                await asyncio.to_thread(self._step, now - last)
                last = now

    def _step(self, dt: float) -> None:
        self._tree.change(lambda cards: _advanced(cards, dt))


def _advanced(cards: _Cards, dt: float) -> _Cards:
    return tuple(_advanced_card(card, dt) for card in cards)


def _advanced_card(card: SimulatedCard, dt: float) -> SimulatedCard:
    # Seeded by the card and its step: two runs move alike, and no generator has to be kept.
    rng = Random(f"{card.spec.family} {card.spec.name} {card.telemetry.ticks}")  # noqa: S311
    state = advance(card.telemetry, dt, rng)
    for name in card.faults:
        state = FAULTS[name].tick(state)
    return replace(card, telemetry=state)


def _find(cards: _Cards, name: str) -> SimulatedCard:
    for card in cards:
        if name in (card.spec.name, card.spec.pci_bus_id, card.spec.uuid):
            return card
    names = [card.spec.name for card in cards]
    close = closest(name, names)
    hint = f"; did you mean {close!r}?" if close else ""
    raise ValueError(f"no card {name!r}{hint} (there are: {', '.join(names) or 'none'})")


class _Tree:
    """One process's hand on a tree; remembers what it wrote, so that only changes are written."""

    def __init__(self, root: Path, *, plain_nodes: bool = False) -> None:
        self.root = root
        self._plain_nodes = plain_nodes
        self._written: dict[str, Content] = {}
        self._made: frozenset[str] | None = None
        self._stamp: tuple[int, int] | None = None

    def change(self, change: Callable[[_Cards], _Cards], *, create: bool = False) -> None:
        """Loads the cards, changes them, and writes what differs, under the tree's lock."""
        if not create and not _state(self.root).exists():
            raise _not_simulated(self.root)
        with _errors_of(self.root), _locked(self.root):
            first = create and not _state(self.root).exists()
            before = () if first else self._load()
            after = change(before)
            wanted = merge((host(), *map(seen, after)))
            self._refuse_taken(wanted)
            self._save(after)
            # A card that is swapped for another is out before the other is in, so that nobody
            # reads one's UUID and the other's serial number.
            specs = {card.spec.index: card.spec for card in before}
            stays = [card for card in after if specs.get(card.spec.index, card.spec) == card.spec]
            if len(stays) < len(after):
                self._write(merge((host(), *map(seen, stays))), after)
            self._write(wanted, after)

    def _load(self) -> _Cards:
        cards, plain_nodes = _load(self.root)
        if self._stamp != _stamp_of(_state(self.root)):  # another process changed the tree
            self._written.clear()
            self._made = None
        self._plain_nodes = self._plain_nodes or plain_nodes
        return cards

    def _save(self, cards: _Cards) -> None:
        text = json.dumps(
            {
                "version": 1,
                "plain_nodes": self._plain_nodes,
                "cards": [asdict(card) for card in cards],
            }
        )
        self._put(_state(self.root), text)
        self._stamp = _stamp_of(_state(self.root))

    def _made_paths(self) -> frozenset[str]:
        if self._made is None:
            path = self.root / STATE_DIR / "paths.json"
            self._made = frozenset(json.loads(path.read_text())) if path.exists() else frozenset()
        return self._made

    def _set_made(self, paths: frozenset[str]) -> None:
        if paths != self._made_paths():
            self._put(self.root / STATE_DIR / "paths.json", json.dumps(sorted(paths)))
            self._made = paths

    def _refuse_taken(self, wanted: Picture) -> None:
        for top in ("sys", "dev"):
            if (self.root / top).is_symlink():
                raise SimulatorError(
                    f"{self.root / top} is a symbolic link, and the simulator only writes "
                    "below its root; give a new or empty directory"
                )
        for path in sorted(_paths(wanted) - self._made_paths()):
            if os.path.lexists(self.root / path):
                raise SimulatorError(
                    f"{self.root / path} is there already, and the simulator did not make it; "
                    "move it away, or give another directory"
                )

    def _write(self, wanted: Picture, cards: _Cards) -> None:
        paths = _paths(wanted)
        stale = self._made_paths() - paths
        # Written down before they are made: a crash leaves nothing that is not known to be ours.
        self._set_made(paths | stale)
        bases = frozenset({"sys/bus/pci/devices", "dev"}).union(
            *(card.spec.traits.driver.directories(card.spec.family) for card in cards)
        )
        for base in sorted(bases):
            _mkdir(self.root / base)
        # Links go first and come last, so that a card is never listed without its files.
        for path in sorted(stale, key=lambda path: not (self.root / path).is_symlink()):
            self._remove(path, bases)
        for path, content in wanted.files.items():
            self._write_file(path, content)
        for path in sorted(wanted.nodes - self._written.keys()):
            self._make_node(path)
        for path, target in wanted.links.items():
            self._make_link(path, target)
        self._set_made(paths)

    def _write_file(self, path: str, content: Content) -> None:
        if self._written.get(path) == content:
            return
        target = self.root / path
        if path in self._written or not _shows(target, content):
            _mkdir(target.parent)
            self._put(target, content, mode=0o444)
        self._written[path] = content

    def _make_node(self, path: str) -> None:
        target = self.root / path
        if not os.path.lexists(target):
            _mkdir(target.parent)
            _make_node(target, plain=self._plain_nodes)
        self._written[path] = ""

    def _make_link(self, path: str, to: str) -> None:
        if self._written.get(path) == to:
            return
        target = self.root / path
        if not (target.is_symlink() and str(target.readlink()) == to):
            _mkdir(target.parent)
            fresh_link = self._beside()
            fresh_link.symlink_to(to)
            _replace(fresh_link, target)
        self._written[path] = to

    def _put(self, target: Path, content: Content, mode: int = 0o644) -> None:
        """Puts content in a place in one step: a reader sees all of the new or of the old."""
        new = self._beside()
        if content is Special.DIRECTORY:
            new.mkdir()
            with suppress(FileNotFoundError):
                target.unlink()  # the one change that cannot be made in one step
        elif content is Special.FIFO:
            os.mkfifo(new)
        else:
            new.write_bytes(content.encode() if isinstance(content, str) else content)
            new.chmod(mode)
        _replace(new, target, content if isinstance(content, str) else "")

    def _beside(self) -> Path:
        """Where something is made before it is put in place; the lock keeps this name for us."""
        path = self.root / STATE_DIR / "new"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        return path

    def _remove(self, path: str, bases: frozenset[str]) -> None:
        target = self.root / path
        self._written.pop(path, None)
        with suppress(FileNotFoundError), _released(target, ""):
            if target.is_dir() and not target.is_symlink():
                target.rmdir()
            else:
                target.unlink()
        for parent in Path(path).parents[:-2]:  # never the top directory, nor root itself
            if str(parent) in bases:
                break
            try:
                (self.root / parent).rmdir()
            except OSError:  # there is more in it
                break


def _state(root: Path) -> Path:
    return root / STATE_DIR / "state.json"


def _stamp_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _not_simulated(root: Path) -> SimulatorError:
    return SimulatorError(
        f"{root} is not a simulated tree; make one with: "
        f"npu-agent simulate {root} --cards {default_cards()}"
    )


def _load(root: Path) -> tuple[_Cards, bool]:
    path = _state(root)
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_simulated(root) from None
    try:
        state = json.loads(text)
        if state["version"] != 1:
            raise ValueError(f"version {state['version']} instead of 1")  # noqa: TRY301
        found = tuple(_card(entry) for entry in state["cards"])
        return found, bool(state["plain_nodes"])
    except (KeyError, TypeError, ValueError) as error:
        raise SimulatorError(
            f"{path} cannot be understood ({error!r}); another version of npu-agent made it? "
            f"Remove {root} and make it again"
        ) from error


def _card(entry: dict[str, Any]) -> SimulatedCard:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry["telemetry"].items()
    }
    faults = tuple(find_fault(name).name for name in entry["faults"])
    return SimulatedCard(CardSpec(**entry["spec"]), CardTelemetry(**values), faults)


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
        if entry.is_dir() and not entry.is_symlink() and not any(entry.iterdir()):
            continue
        raise SimulatorError(
            f"{root} is not empty ({entry.name}) and was not made by npu-agent simulate; "
            "give a new or empty directory"
        )


def _may_be_dev(path: Path) -> bool:
    """Whether device nodes may be made here: it is mounted, or some /dev with its null."""
    if path.is_symlink() or not path.is_dir():
        return False
    return path.is_mount() or (path / "null").is_char_device()


def _paths(wanted: Picture) -> frozenset[str]:
    return frozenset((*wanted.files, *wanted.links, *wanted.nodes))


@contextmanager
def _errors_of(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot use {root} for a simulated tree: {reason(error)}"
        raise SimulatorError(message) from error


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One at a time; `flock` also keeps threads of one process apart."""
    descriptor = os.open(root / STATE_DIR / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    with _errors_of(root):
        path = root / STATE_DIR / "alive"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with _errors_of(root), _locked(root):
            mine = _try_lock(descriptor)
        if not mine:
            pid = path.read_text().strip() or "unknown"
            raise SimulatorError(
                f"{root} is kept alive by another simulator already (process {pid}); "
                "stop that one, or give another directory"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _mkdir(path: Path) -> None:
    """As `mkdir -p`, readable by all whatever the umask is: the agent may be another user."""
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
    path.chmod(0o666)  # whatever the umask is


def _shows(path: Path, content: Content) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if content is Special.FIFO:
        return stat.S_ISFIFO(mode)
    if content is Special.DIRECTORY:
        return stat.S_ISDIR(mode)
    data = content.encode() if isinstance(content, str) else content
    return stat.S_ISREG(mode) and path.read_bytes() == data


def _replace(new: Path, target: Path, answer: str = "") -> None:
    with _released(target, answer):
        if not new.is_dir() and target.is_dir() and not target.is_symlink():
            target.rmdir()
        new.replace(target)


@contextmanager
def _released(path: Path, answer: str) -> Iterator[None]:
    """While a named pipe goes away: whoever waits on it gets the answer, or the end of the file.

    Otherwise a reader would wait on the unlinked pipe for ever, while a driver that comes to its
    senses answers the reads that hang.
    """
    descriptor = None
    if path.is_fifo() and not path.is_symlink():
        # Read and write: on Linux this never waits. From here on nobody who opens it waits either.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield
        if descriptor is not None:
            os.write(descriptor, answer.encode())
    finally:
        if descriptor is not None:
            os.close(descriptor)
