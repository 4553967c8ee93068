"""Where expensive things are kept between runs, outside the checkout.

Everything below `cache_dir()` can be deleted at any time; the next run makes it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def cache_dir() -> Path:
    """The cache directory: `$NPU_AGENT_CACHE`, else `~/.cache/npu-agent`."""
    return Path(os.environ.get("NPU_AGENT_CACHE") or Path.home() / ".cache" / "npu-agent")


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock `name`; a second run waits here until the first is done."""
    path = cache_dir() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(name: str, key: object, make: Callable[[Path], None], *, keep: int = 2) -> Path:
    """The directory made by `make` for this `name` and `key`, made only if it is not there yet.

    Args:
        name: what it is, for people: `kubernetes-1.37.2`.
        key: everything that determines the content, as JSON takes it.
        make: fills the empty directory that it is given; if it raises, nothing is kept.
        keep: how many directories of this name, with different keys, stay in the cache.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    entry = cache_dir() / f"{name}-{digest}"
    with locked(name):
        if not entry.exists():
            # Below the cache, as a rename does not cross file systems. Another run's half-made
            # directory can only be left over: whoever makes this name holds the lock.
            scratch = cache_dir() / "tmp" / name
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                make(scratch)
                scratch.rename(entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        os.utime(entry)
        siblings = [e for e in cache_dir().glob(f"{name}-{'[0-9a-f]' * 12}") if e != entry]
        siblings.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in siblings[keep - 1 :]:
            shutil.rmtree(old)
    return entry
