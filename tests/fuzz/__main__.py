"""`make fuzz`: tries new inputs on each target, and keeps in the corpus what fails.

ARGS: `--seconds 60` for each target (10), names of targets (all).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from random import Random

from tests.fuzz.corpus import keep, kept
from tests.fuzz.mutate import mutated, smaller
from tests.fuzz.targets import TARGETS, Target, attempt

SLOW = 2.0
"""Seconds that no parser takes for 64 KiB, whatever else the machine does."""
MOST = 5
"""Failures of one target after which the next one is tried."""


def main() -> int:
    """Returns 1 if anything fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target (10)")
    parser.add_argument("--seed", type=int, help="the same inputs again")
    parser.add_argument(
        "names", nargs="*", metavar="TARGET", help=", ".join(t.name for t in TARGETS)
    )
    wanted = parser.parse_args()
    if unknown := set(wanted.names) - {target.name for target in TARGETS}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    seed = wanted.seed if wanted.seed is not None else time.time_ns() % 1_000_000
    print(f"--seed {seed}")
    logging.disable()
    chosen = [target for target in TARGETS if target.name in wanted.names or not wanted.names]
    return int(sum(fuzzed(target, wanted.seconds, Random(seed)) for target in chosen) > 0)


def fuzzed(target: Target, seconds: float, chance: Random) -> int:
    """Tries inputs for so long; returns how many failed in different ways."""
    corpus, until = kept(target.name), time.monotonic() + seconds
    found: dict[str, str] = {}
    tried = slowest = 0.0
    while time.monotonic() < until and len(found) < MOST:
        data = mutated(chance, corpus)
        began = time.monotonic()
        why = failure(target, data)
        took = time.monotonic() - began
        tried, slowest = tried + 1, max(slowest, took)
        why = why or ("SLOW" if took > SLOW else "")
        if why and why not in found:
            if why != "SLOW":
                data = smaller(data, lambda less, why=why: failure(target, less) == why)  # type: ignore[misc]
            found[why] = str(keep(target.name, data))
    print(f"{target.name:20} {tried:9.0f} inputs, the slowest {slowest * 1e3:.0f} ms", flush=True)
    for why, path in found.items():
        print(f"  {why}\n    kept: {path}", flush=True)
    return len(found)


def failure(target: Target, data: bytes) -> str:
    """How an input fails, and where; empty: it does not."""
    try:
        attempt(target, data)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {where.filename}:{where.lineno}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
