"""The inputs that are kept: for each target a directory, with a file for each.

Those with names were made by hand or recorded; those that begin with ``found-`` made a parser fail
once, and show that it does not any more.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent


def kept(name: str) -> list[bytes]:
    """The inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in paths(name)]


def paths(name: str) -> list[Path]:
    """Their files."""
    return sorted(path for path in (ROOT / name).glob("*") if path.is_file())


def keep(name: str, data: bytes) -> Path:
    """Adds an input to a target's."""
    path = ROOT / name / f"found-{hashlib.sha256(data).hexdigest()[:8]}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
