"""What a tree shows at one moment, as plain values: files, links and device nodes.

Paths are relative to the root of the tree.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Special(Enum):
    """What can stand where a file should be."""

    FIFO = "a named pipe that nobody writes to: whoever opens it waits"
    DIRECTORY = "a directory: reading it fails, for root as well"


Content = str | bytes | Special


@dataclass(frozen=True)
class Picture:
    """All that is to be seen of something in the tree.

    Attributes:
        files: path -> content.
        links: path -> target, relative to the link's own directory.
        nodes: paths of device nodes.
    """

    files: Mapping[str, Content] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()


def host() -> Picture:
    """What the tree shows of the machine around the cards: its maker and name."""
    real = "sys/devices/virtual/dmi/id"
    return Picture(
        files={
            f"{real}/sys_vendor": "npu-agent\n",
            f"{real}/product_name": "Simulated Host\n",
        },
        links={"sys/class/dmi/id": "../../devices/virtual/dmi/id"},
    )


def merge(pictures: Iterable[Picture]) -> Picture:
    """Several pictures as one; they share no path."""
    whole = list(pictures)
    return Picture(
        files={path: content for one in whole for path, content in one.files.items()},
        links={path: target for one in whole for path, target in one.links.items()},
        nodes=frozenset(path for one in whole for path in one.nodes),
    )
