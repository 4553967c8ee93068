"""The config is followed while the agent runs: a good file is applied, a bad one is reported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from npu_agent import files
from npu_agent.config import load, poller
from npu_agent.config.load import content
from npu_agent.config.poller import Poller, PollTiming
from npu_agent.vendors import SPEC
from tests.until import first, until

GOOD = "defaultPe: Fusion\ninterval: 10\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


@contextlib.asynccontextmanager
async def following(path: Path, **times: float) -> AsyncIterator[Poller]:
    timing = PollTiming(**{"every": 0.01, "settle": 0.005, **times})
    followed = Poller(path, SPEC, load(path, SPEC), timing)
    started = followed.states.value
    running = asyncio.create_task(followed.run())
    try:
        # It has read once: what is written from here on is a change.
        await first(followed.states, lambda state: state != started)
        yield followed
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.rename(path)


async def test_a_live_key_is_in_force_and_logged(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with following(file) as followed:
        replace(file, "defaultPe: Single\ninterval: 5\nhealth: {failures: 4}\n")
        state = await first(followed.states, lambda s: s.generation == 2)
    config = followed.configs.value
    assert (config.default_pe, config.interval, config.health.failures) == ("Single", 5, 4)
    assert state.waiting == ()
    logged = [record.fields["change"] for record in caplog.records if hasattr(record, "fields")]
    assert logged == [
        "defaultPe: Fusion -> Single",
        "interval: 10 -> 5",
        "health.failures: 2 -> 4",
    ]


async def test_a_restart_key_waits_and_the_live_ones_with_it_do_not(file: Path) -> None:
    async with following(file) as followed:
        replace(file, "resourceName: a.example/b\ninterval: 5\n")
        state = await first(followed.states, lambda s: s.waiting)
        assert state.waiting == ("resourceName",)
        assert followed.configs.value.resource_name == "beta.furiosa.ai/npu"
        assert followed.configs.value.interval == 5
        replace(file, "interval: 5\n")
        await first(followed.states, lambda s: not s.waiting)
        assert followed.configs.value.interval == 5


async def test_live_keys_that_do_not_go_with_the_old_restart_keys_wait_with_them(
    file: Path,
) -> None:
    file.write_text("labels: {output: api, sets: [beta]}\n", encoding="utf-8")
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
        ("interval: [\n", "config.yaml"),
        ("  \n\n", "the file is empty"),
        (None, "no such file"),
    ],
)
async def test_a_bad_edit_is_refused_whole_and_logged_once(
    file: Path, text: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(file) as followed:
        before = followed.configs.value
        if text is None:
            file.unlink()
        else:
            replace(file, text)
        state = await first(followed.states, lambda s: s.error)
        assert message in (state.error or "")
        for _ in range(20):
            followed.read_now()
            await asyncio.sleep(0.002)
        assert followed.configs.value == before
        assert [r.levelname for r in caplog.records].count("ERROR") == 1
        # It is good again with the very content of before.
        replace(file, GOOD)
        state = await first(followed.states, lambda s: s.error is None)
        assert (state.rejected, state.generation) == (1, 1)
        replace(file, "interval: 0\n")
        await first(followed.states, lambda s: s.rejected == 2)


async def test_a_configmaps_symlinks_are_followed(file: Path) -> None:
    mount = file.parent / "mount"
    for version, text in (("..1", "interval: 1\n"), ("..2", "interval: 2\n")):
        (mount / version).mkdir(parents=True)
        (mount / version / "config.yaml").write_text(text, encoding="utf-8")
    (mount / "..data").symlink_to("..1")
    (mount / "config.yaml").symlink_to("..data/config.yaml")
    async with following(mount / "config.yaml") as followed:
        assert followed.configs.value.interval == 1
        # As the kubelet does it: a new directory, and one rename of the link to it.
        (mount / "..tmp").symlink_to("..2")
        (mount / "..tmp").rename(mount / "..data")
        await first(followed.configs, lambda config: config.interval == 2)


async def test_a_file_that_is_still_being_written_is_in_force_only_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is good YAML that says something else."""
    whole, seen = b"interval: 20\ndefaultPe: Single\n", []
    reads = iter([whole[:13], whole])
    async with following(file) as followed:
        monkeypatch.setattr(poller, "content", lambda _: next(reads, whole))
        async for config in followed.configs.watch():
            seen.append((config.interval, config.default_pe))
            if config.default_pe == "Single":
                break
    assert seen == [(10, "Fusion"), (20, "Single")]
    assert followed.states.value.rejected == 0


async def test_a_file_that_stays_as_it_is_is_not_parsed_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the largest size takes a second, and there is a look each second."""
    reads = 0

    def counted(path: Path) -> bytes:
        nonlocal reads
        reads += 1
        return content(path)

    async with following(file) as followed:
        state = followed.states.value
        monkeypatch.setattr(poller, "content", counted)
        await until(lambda: reads >= 4)
        assert followed.states.value is state


async def test_read_now_does_not_wait_for_the_next_poll(file: Path) -> None:
    async with following(file, every=1000.0) as followed:
        replace(file, "interval: 3\n")
        followed.read_now()
        await first(followed.configs, lambda config: config.interval == 3)


async def test_an_edit_whose_parse_was_given_up_is_judged_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: object) -> None:
        raise OSError(errno.EAGAIN, "no more threads: check the limit of processes")

    async with following(file) as followed:
        with monkeypatch.context() as patched:
            patched.setattr(followed._thread, "submit", no_thread)
            replace(file, "interval: 7\n")
            followed.read_now()
            state = await first(followed.states, lambda s: s.error)
            assert "no more threads" in (state.error or "")
        await first(followed.states, lambda s: s.error is None)
        assert followed.configs.value.interval == 7


async def test_a_file_that_hangs_is_reported_and_blocks_no_other_part(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, opened = threading.Event(), files.regular

    def hang(path: Path, flags: int) -> int:
        release.wait(10)
        return opened(path, flags)

    async with following(file, deadline=0.05) as followed:
        threads = threading.active_count()
        monkeypatch.setattr(files, "regular", hang)
        replace(file, "interval: 7\n")
        state = await first(followed.states, lambda s: s.error)
        assert (
            state.error == f"{file}: cannot be read by uid {os.geteuid()}: no answer within 0.05 s"
        )
        await asyncio.sleep(0.3)  # several polls
        assert threading.active_count() <= threads + 1
        release.set()
        await first(followed.states, lambda s: s.error is None)
        assert followed.configs.value.interval == 7
