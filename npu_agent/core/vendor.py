"""The interface of a vendor of cards, and its values.

A vendor's folder in `npu_agent.vendors` has one class with these verbs, an object of it for each
host's root. All but the tables are blocking I/O that may hang: `npu_agent.inventory` calls them on
threads.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from npu_agent.core.hardware import Card, CoreReading, Reading
    from npu_agent.core.vendor_spec import VendorSpec


OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a read for which this process or the host is to blame, not a card. The verbs raise an
OSError with one of them, and take no file for absent."""


class NotServedError(Exception):
    """An entry that is not a card we serve; the message says why.

    Attributes:
        sample: whether it is an FPGA sample of the family.
    """

    def __init__(self, message: str, *, sample: bool = False) -> None:
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A place where a card of a family may be."""

    family: str
    index: int
    path: str
    """On this machine, i.e. below the host root."""
    inode: int
    """A reloaded driver makes a new entry, with another inode."""
    counters_wrap: bool
    """Whether its counters start again from 0 at 2**32, and have to be read often while in use."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.family, self.index)

    @property
    def name(self) -> str:
        return f"npu{self.index}"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a card works, at one moment."""

    alive: bool | None
    """None: the driver does not say."""
    reason: str
    """Why it is not alive, for people: ``alive says 0``."""
    nodes: frozenset[str]
    """Those that exist now, as `Card.nodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDriver:
    """The driver of a family, as a host shows it."""

    family: str
    title: str
    directory: str
    """Below the host's root: there once the driver is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Signs of a vendor's cards outside its driver, for `doctor` and `verify`."""

    title: str
    pci: str | None
    """Its PCI vendor ID: ``1a2b``; None: not on the PCI bus."""
    plugins: str
    """A part of the names of its own device plugins' sockets and DaemonSets."""
    drivers: tuple[KernelDriver, ...]
    nodes: tuple[str, ...]
    """Its device nodes, as globs below /dev."""
    identities: tuple[str, ...]
    """Names of the drivers' files that tell one card from all others in the world."""
    environment: tuple[tuple[str, str], ...]
    """The variables that say which cores a container has, with the form of each item:
    ``("ANVIL_CORES", "{n}:{cores}")``; ``{n}`` is the card's number."""
    cdi_kinds: tuple[str, ...]
    """As `Access.cdi_kind`."""


class Vendor(Protocol):
    """The cards of one vendor on one host."""

    spec: ClassVar[VendorSpec]
    """What config files, labels and metrics call things."""
    profile: ClassVar[Profile]

    def __init__(self, root: Any, *, simulated: bool = False) -> None:
        """`root` is the path where the host's ``/`` is seen; `simulated` is for `Card`."""

    @property
    def place(self) -> str:
        """The directory that lists its cards, for messages: ``/sys/class``."""

    def scan(self) -> tuple[Entry, ...]:
        """Every place where a card may be, sorted by number, family and path; raises OSError."""

    def identify(self, entry: Entry) -> Card:
        """Identifies the card at `entry`.

        Raises:
            NotServedError: it is none that we serve.
            OSError: it does not let us read its type.
        """

    def probe(self, entry: Entry) -> Probe:
        """Whether the card at `entry` works, and which nodes it has; cheap, as it is asked often.

        Raises:
            OSError: the driver refuses to say.
            ValueError: it answers nonsense; the message says what, for people.
        """

    def read(self, entry: Entry, card: Card) -> Reading:
        """The telemetry of `card`, which is at `entry`; what cannot be read is left out."""

    def read_cores(self, entry: Entry) -> tuple[CoreReading, ...]:
        """The counters of each core of which the driver says something.

        `CoreReading.utilization` is 0 for a core that is not in use, else None.
        """

    def pci_addresses(self) -> frozenset[str]:
        """The addresses of all cards that its drivers show, also of those that are not served.

        Raises:
            OSError: they cannot be listed or read.
        """

    def given(self) -> tuple[Card, ...]:
        """A container's view: cards with nodes in /dev; only family, number and nodes."""
