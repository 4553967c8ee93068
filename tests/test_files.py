"""Regular files are read with a bound and replaced as a whole, whatever the file system does."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from npu_agent import files
from tests.threads import working
from tests.until import until

DEADLINE = 20.0


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
async def test_a_file_is_written_with_its_directory_and_for_everybody(
    tmp_path: Path, mask: int
) -> None:
    path = tmp_path / "a" / "b" / "file"
    before = os.umask(mask)
    try:
        await files.replace(path, b"content")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.stat().st_mode & 0o777 for each in path.parents[:2]] == [0o755, 0o755]
    assert [each.name for each in path.parent.iterdir()] == ["file"]


async def test_the_mode_of_a_directory_that_is_there_is_its_owners(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    await files.replace(tmp_path / "a" / "b" / "file", b"content")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


async def test_a_file_with_the_same_content_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    await files.replace(path, b"content")
    before = files.identity(path)
    await files.replace(path, b"content")
    assert files.identity(path) == before
    await files.replace(path, b"content, and more")
    assert files.identity(path) != before
    await files.replace(path, b"content")
    assert path.read_bytes() == b"content"


async def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    foreign, path = tmp_path / "foreign", tmp_path / "file"
    foreign.write_bytes(b"content")
    path.symlink_to(foreign)
    with pytest.raises(files.LinkError, match="a symbolic link"):
        await files.read(path, 10, follow=False)
    assert await files.read(path, 10) == b"content"  # as ConfigMaps and tokens are
    await files.replace(path, b"content")
    assert not path.is_symlink()
    assert path.read_bytes() == foreign.read_bytes() == b"content"


async def test_a_pipe_is_replaced_and_a_directory_is_not(tmp_path: Path) -> None:
    path, directory = tmp_path / "file", tmp_path / "directory"
    os.mkfifo(path)
    await files.replace(path, b"content")
    assert path.read_bytes() == b"content"
    directory.mkdir()
    with pytest.raises(IsADirectoryError):
        await files.replace(directory, b"content")
    assert {each.name for each in tmp_path.iterdir()} == {"file", "directory"}


async def test_a_file_that_was_made_unreadable_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0)

    opened = files.regular

    def refused(path: Path, flags: int) -> int:  # as it is for a root without capabilities
        if not flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags)

    monkeypatch.setattr(files, "regular", refused)
    await files.replace(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o644)


def test_a_file_that_cannot_be_seen_for_now_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.touch()
    other.touch()
    known = files.identity(path)
    assert not files.gone(path, known)
    for number in (errno.EACCES, errno.EIO, errno.ENOMEM):
        error = OSError(number, os.strerror(number))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "lstat", Mock(side_effect=error))
            assert not files.gone(path, known)
    assert files.gone(other / "file", known)
    other.replace(path)
    assert files.gone(path, known)
    path.unlink()
    assert files.gone(path, known)


async def test_a_missing_directory_is_made_only_where_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await files.replace(tmp_path / "a" / "file", b"", make_directory=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "what"),
    [(Path.mkdir, "this is a directory"), (os.mkfifo, "this is not a regular file")],
)
async def test_paths_that_are_no_files(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    make(tmp_path / "file")
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        with pytest.raises(files.IrregularError) as caught:
            await files.read(tmp_path / "file", 10)
        assert caught.value.strerror == what
    # Fewer may be open by now: of tests before this one.
    assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, files called slow hang."""
    event, opened = threading.Event(), files.regular

    def hang(path: Path, flags: int) -> int:
        if path.name == "slow":
            event.wait(DEADLINE)
        return opened(path, flags)

    monkeypatch.setattr(files, "regular", hang)
    return event


async def test_a_hung_write_delays_no_other_file_and_never_lands_later(
    tmp_path: Path, free: threading.Event
) -> None:
    slow = tmp_path / "slow"
    with pytest.raises(TimeoutError) as caught:
        await files.replace(slow, b"old", deadline=0.05)
    assert caught.value.strerror == "no answer within 0.05 s"
    await files.replace(tmp_path / "quick", b"content", deadline=DEADLINE)
    free.set()
    with pytest.raises(FileNotFoundError):  # in its turn: after what hung
        await files.read(slow, 10, deadline=DEADLINE)
    await files.replace(slow, b"new", deadline=DEADLINE)
    await until(lambda: {each.name for each in tmp_path.iterdir()} == {"slow", "quick"})
    assert slow.read_bytes() == b"new"


async def test_a_file_that_hangs_has_one_thread_however_often_it_is_tried(
    tmp_path: Path, free: threading.Event
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    before = set(working())
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await files.read(slow, 10, deadline=0.01)
        with pytest.raises(TimeoutError):
            await files.replace(slow, b"content", deadline=0.01)
    assert sum(thread not in before for thread in working()) == 1
    waiting = [future for future, _ in files._thread_of(slow)._calls]
    assert all(future.cancelled() for future in waiting)
    free.set()
    assert await files.read(slow, 10, deadline=DEADLINE) == b""


async def test_files_that_were_used_once_are_forgotten(tmp_path: Path) -> None:
    for number in range(20):
        await files.replace(tmp_path / str(number), b"content")

    def known() -> bool:
        return any(path.parent == tmp_path for path in files._threads)

    await until(lambda: not known(), "each claim that was ever prepared is remembered")
