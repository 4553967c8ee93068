"""The config is followed while the agent runs: what is good is in force, what is bad is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from npu_agent import files
from npu_agent.config import Effective, load, parse, poller
from npu_agent.config.poller import Poller
from npu_agent.core.vocabulary import Vocabulary
from npu_agent.vendors import WORDS
from tests.until import first, until

GOOD = "defaultPe: Fusion\ninterval: 10\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(poller, "_POLL_EVERY", 0.01)
    monkeypatch.setattr(poller, "_READ_EVERY", 1000.0)
    monkeypatch.setattr(poller, "_READ_AGAIN", 0.1)
    monkeypatch.setattr(poller, "_SETTLE", 0.005)
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return path


@contextlib.asynccontextmanager
async def following(path: Path) -> AsyncIterator[Poller]:
    followed = Poller(path, WORDS, load(path, WORDS))
    running = asyncio.create_task(followed.run())
    try:
        # It has looked once: what is written from here on is a change.
        while followed._judged is None:
            await asyncio.sleep(0)
        yield followed
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


async def test_a_live_key_is_in_force_and_logged(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with following(file) as followed:
        replace(file, "defaultPe: Single\ninterval: 5\nhealth: {failures: 4}\n")
        state = await first(followed.states, lambda s: s.generation == 2)
    assert followed.configs.value.default_pe == "Single"
    assert followed.configs.value.interval == 5
    assert followed.configs.value.health.failures == 4
    assert state.waiting == ()
    told = [record.fields["change"] for record in caplog.records if hasattr(record, "fields")]
    assert told == ["defaultPe: Fusion -> Single", "interval: 10 -> 5", "health.failures: 2 -> 4"]


async def test_a_file_is_parsed_beside_the_loop(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 9,000 disabled devices takes a second, and the kubelet waits for the loop."""
    begun, free = threading.Event(), threading.Event()

    def slow(data: bytes, source: str, words: Vocabulary) -> Effective:
        begun.set()
        assert free.wait(10), "the loop stands still meanwhile"
        return parse(data, source, words)

    async with following(file) as followed:
        monkeypatch.setattr(poller, "parse", slow)
        replace(file, "interval: 5\n")
        await until(begun.is_set)
        free.set()
        await first(followed.configs, lambda config: config.interval == 5)


async def test_a_restart_key_waits_and_the_live_ones_beside_it_do_not(file: Path) -> None:
    async with following(file) as followed:
        replace(file, "resourceName: a.example/b\ninterval: 5\n")
        state = await first(followed.states, lambda s: s.waiting)
        assert state.waiting == ("resourceName",)
        assert followed.configs.value.resource_name == "beta.furiosa.ai/npu"
        assert followed.configs.value.interval == 5
        replace(file, "interval: 5\n")
        state = await first(followed.states, lambda s: not s.waiting)
        assert followed.configs.value.interval == 5


async def test_live_keys_that_do_not_go_with_the_old_restart_keys_wait_with_them(
    file: Path,
) -> None:
    file.write_text("labels: {output: api, sets: [beta]}\n")
    async with following(file) as followed:
        # Each is good, but `api` without a set is not, and the output needs a restart.
        replace(file, "labels: {output: none, sets: []}\n")
        state = await first(followed.states, lambda s: s.waiting)
    assert state.waiting == ("labels.output", "labels.sets")
    assert followed.configs.value.labels.sets == ("beta",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interval: 10\ndefaultPE: Single\n", "2: defaultPE"),
        ("interval: 0\n", "1: interval"),
        ("interval: [\n", "config.yaml"),
        ("", "the file is empty"),
        ("  \n\n", "the file is empty"),
    ],
)
async def test_a_bad_edit_is_refused_whole(file: Path, text: str, message: str) -> None:
    async with following(file) as followed:
        before = followed.configs.value
        replace(file, text)
        state = await first(followed.states, lambda s: s.error)
        assert state.error is not None
        assert message in state.error
        assert followed.configs.value == before
        assert (state.rejected, state.generation) == (1, 1)
        # It comes good again with the very content of before.
        replace(file, GOOD)
        state = await first(followed.states, lambda s: s.error is None)
        assert (state.rejected, state.generation) == (1, 1)


async def test_a_bad_edit_is_told_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with following(file) as followed:
        replace(file, "interval: 0\n")
        await first(followed.states, lambda s: s.error)
        for _ in range(20):
            followed.read_now()
            await asyncio.sleep(0.005)
        assert followed.states.value.rejected == 1
        replace(file, "interval: -1\n")
        await first(followed.states, lambda s: s.rejected == 2)
    assert [r.levelname for r in caplog.records if r.levelname == "ERROR"] == ["ERROR"] * 2


async def test_a_file_that_vanishes_changes_nothing_and_comes_back(file: Path) -> None:
    async with following(file) as followed:
        file.rename(file.with_suffix(".away"))
        state = await first(followed.states, lambda s: s.error)
        assert state.error is not None
        assert "no such file" in state.error
        assert followed.configs.value.interval == 10
        file.with_suffix(".away").rename(file)
        await first(followed.states, lambda s: s.error is None)
        assert followed.states.value.generation == 1


async def test_a_configmaps_symlinks_are_followed(file: Path) -> None:
    mount = file.parent / "mount"
    for version, text in (("..1", "interval: 1\n"), ("..2", "interval: 2\n")):
        (mount / version).mkdir(parents=True)
        (mount / version / "config.yaml").write_text(text)
    (mount / "..data").symlink_to("..1")
    (mount / "config.yaml").symlink_to("..data/config.yaml")
    async with following(mount / "config.yaml") as followed:
        assert followed.configs.value.interval == 1
        # As the kubelet does it: a new directory, and one rename of the link to it.
        (mount / "..tmp").symlink_to("..2")
        (mount / "..tmp").rename(mount / "..data")
        await first(followed.states, lambda _: followed.configs.value.interval == 2)


async def test_a_file_written_piece_by_piece_is_seen_only_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is good YAML that says something else; only the whole may be in force."""
    monkeypatch.setattr(poller, "_SETTLE", 0.05)
    seen = []
    async with following(file) as followed:

        async def note() -> None:
            async for config in followed.configs.watch():
                seen.append((config.interval, config.default_pe))  # noqa: PERF401 (as it happens)

        noting = asyncio.create_task(note())
        with file.open("w") as writing:
            for line in ("interval: 10\n", "", "", "", "defaultPe: Single\n"):
                writing.write(line)
                writing.flush()
                os.fsync(writing.fileno())
                await asyncio.sleep(0.01)
        await first(followed.states, lambda _: followed.configs.value.default_pe == "Single")
        noting.cancel()
    assert seen == [(10, "Fusion"), (10, "Single")]
    assert followed.states.value.rejected == 0


async def test_sighup_has_it_read_now(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "_POLL_EVERY", 1000.0)
    async with following(file) as followed:
        replace(file, "interval: 3\n")
        followed.read_now()
        await first(followed.states, lambda _: followed.configs.value.interval == 3)


async def test_a_file_that_hangs_is_reported_and_holds_up_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    opened = files.regular
    before = threading.active_count()

    def hang(path: Path, flags: int) -> int:
        release.wait(10)
        return opened(path, flags)

    async with following(file) as followed:
        monkeypatch.setattr(poller, "_DEADLINE", 0.05)
        monkeypatch.setattr(files, "regular", hang)
        replace(file, "interval: 7\n")
        state = await first(followed.states, lambda s: s.error)
        assert state.error == f"{file}: cannot be read: no answer within 0.05 s"
        await asyncio.sleep(0.3)  # several polls
        assert threading.active_count() <= before + 3  # two that poll, and the one that hangs
        monkeypatch.setattr(files, "regular", opened)
        release.set()
        await first(followed.states, lambda s: s.error is None)
        assert followed.configs.value.interval == 7


async def test_a_change_that_does_not_show_is_read_now_and_then(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "_READ_EVERY", 0.1)
    monkeypatch.setattr(poller, "_version", lambda _: (1, 2, 3, 4))
    async with following(file) as followed:
        file.write_text(GOOD.replace("10", "20"))
        await first(followed.states, lambda _: followed.configs.value.interval == 20)


async def test_an_unchanged_file_is_not_read_at_each_poll(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = polled = 0
    opened, version = files.regular, poller._version

    def count(path: Path, flags: int) -> int:
        nonlocal read
        read += 1
        return opened(path, flags)

    def poll(path: Path) -> object:
        nonlocal polled
        polled += 1
        return version(path)

    monkeypatch.setattr(poller, "_version", poll)
    monkeypatch.setattr(poller, "_READ_EVERY", 0.3)
    async with following(file) as followed:
        await until(lambda: polled > 3)
        monkeypatch.setattr(files, "regular", count)
        began = time.monotonic()
        await until(lambda: polled > 60 and read)
        assert read <= (time.monotonic() - began) / 0.3 + 1
        assert followed.states.value.generation == 1
