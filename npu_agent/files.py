"""Files that others read: replaced at once, so that nobody sees half of one."""

from __future__ import annotations

import secrets
from pathlib import Path


def replace(path: Path, content: bytes | None) -> None:
    """Puts `content` in place, or takes the file away (None); leaves it alone if it is so already.

    Raises:
        OSError: the directory cannot be made or written.
    """
    if content is None:
        path.unlink(missing_ok=True)
        return
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and with an ending of its own: some readers take every *.json of a directory. Random,
    # as the two agents of a rolling update may both be process 1 of their containers.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_bytes(content)
        unfinished.chmod(0o644)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
