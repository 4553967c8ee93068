"""What is kept is tried again, and as many new inputs as there is time for.

Those are the same each time, or others for as many seconds as FUZZ_SECONDS says (`make fuzz`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.corpus import ROOT, keep, kept, paths
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Target, attempt

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SLOW = 2.0
"""Seconds that no parser takes for 64 KiB, whatever else the machine does."""


@pytest.mark.parametrize(
    ("target", "path"),
    [
        pytest.param(each, path, id=f"{each.name}-{path.name}")
        for each in TARGETS
        for path in paths(each.name)
    ],
)
def test_an_input_that_is_kept(target: Target, path: Path) -> None:
    attempt(target, path.read_bytes())


@pytest.mark.timeout(60 + 2 * SECONDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_new_inputs(target: Target) -> None:
    # The same on each machine and each Python, for `Random` and a text as its seed.
    chance, known = Random(time.time_ns() if SECONDS else target.name), kept(target.name)
    tries, until = 0, time.monotonic() + SECONDS
    while tries < target.tries or time.monotonic() < until:
        data, began, tries = mutated(chance, known), time.monotonic(), tries + 1
        try:
            attempt(target, data)
            assert time.monotonic() - began < SLOW
        except Exception:
            print(f"the input: {data!r}, kept: {keep(target.name, data) if SECONDS else 'no'}")
            raise


def test_each_target_has_inputs_and_each_input_a_target() -> None:
    found = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert found == {target.name for target in TARGETS}
    assert all(paths(name) for name in found)


def _broken(data: bytes) -> None:
    raise {b"a": KeyError(), b"long": ValueError("x" * 10_001)}.get(data, ValueError("\x1b[2J"))


@pytest.mark.parametrize("data", [b"a", b"long", b"steer"])
def test_an_error_that_is_not_allowed_is_a_failure(data: bytes) -> None:
    target = Target(name="broken", parse=_broken, allowed=(ValueError,))
    with pytest.raises((KeyError, AssertionError)):
        attempt(target, data)
