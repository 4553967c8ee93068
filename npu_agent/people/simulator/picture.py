"""A driver tree at one moment, as plain values by path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Special(Enum):
    """Kinds of entries other than files and links."""

    NODE = "a device node"
    FIFO = "a named pipe without a writer: opening it waits"
    DIRECTORY = "a directory where a file should be: reading it fails, for root as well"


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str
    """Relative to the link's own directory."""


Content = str | bytes | Link | Special
Picture = Mapping[str, Content]
"""Paths are relative to the root of the tree."""

HOST: Picture = {
    "sys/devices/virtual/dmi/id/sys_vendor": "npu-agent\n",
    "sys/devices/virtual/dmi/id/product_name": "Simulated Host\n",
    "sys/class/dmi/id": Link("../../devices/virtual/dmi/id"),
}
"""The machine around the cards: its maker and name."""
