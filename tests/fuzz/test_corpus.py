"""What is kept is tried again, and as many new inputs as there is time for, the same each time."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz import corpus
from tests.fuzz.__main__ import failure
from tests.fuzz.corpus import ROOT, kept, paths
from tests.fuzz.mutate import mutated, smaller
from tests.fuzz.targets import TARGETS, Target, attempt

NAMED = {target.name: target for target in TARGETS}


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


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_new_inputs(target: Target) -> None:
    # The same on each machine and each Python, for `Random` and a text as its seed.
    chance, known = Random(target.name), kept(target.name)
    for _ in range(target.tries):
        data = mutated(chance, known)
        try:
            attempt(target, data)
        except Exception:
            print(f"the input: {data!r}")
            raise


def test_each_target_has_inputs_and_each_input_a_target() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "_"} == set(
        NAMED
    )
    assert all(paths(name) for name in NAMED)


def _broken(data: bytes) -> None:
    if b"\xff" in data:
        raise KeyError
    if b"long" in data:
        raise ValueError("x" * 10_001)
    if b"steer" in data:
        raise ValueError("\x1b[2J")
    if data:
        raise ValueError("as it may")


@pytest.mark.parametrize("data", [b"a\xff", b"too long", b"steer"])
def test_what_is_not_allowed_is_a_failure(data: bytes) -> None:
    target = Target(name="broken", parse=_broken, allowed=(ValueError,))
    assert not failure(target, b"refused")
    assert not failure(target, b"")
    assert failure(target, data)


def test_a_failure_is_made_small_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    target = Target(name="broken", parse=_broken, allowed=(ValueError,))
    data = smaller(b"some\xffthing" * 9, lambda less: bool(failure(target, less)))
    assert data == b"\xff"
    path = corpus.keep(target.name, data)
    assert corpus.paths(target.name) == [path]
    assert path.name.startswith("found-")
