import errno
import fcntl
import os
from pathlib import Path

import pytest

from npu_agent import __version__
from npu_agent.kubelet.lock import LockByte, LockFile, lock_path


def lock(directory: Path) -> LockFile:
    """The open lock file of another agent."""
    file = LockFile(directory)
    file.open_current()
    return file


def test_a_link_in_place_of_the_lock_leads_nowhere(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("another program's", encoding="utf-8")
    lock_path(tmp_path).symlink_to(foreign)
    with pytest.raises(OSError, match=r"\.npu-agent\.lock"):
        lock(tmp_path)
    assert foreign.read_text(encoding="utf-8") == "another program's"


def test_the_lock_and_each_byte_have_one_agent(tmp_path: Path) -> None:
    ours, theirs = lock(tmp_path), lock(tmp_path)
    assert theirs.is_free()
    assert ours.take()
    assert not theirs.is_free()
    assert not theirs.take()

    for byte in LockByte:
        assert theirs.lock_byte(byte)
        assert theirs.lock_byte(byte)
        assert not ours.lock_byte(byte)
        assert ours.is_byte_locked(byte)
        assert not theirs.is_byte_locked(byte)
    theirs.lock_byte(LockByte.NEXT, on=False)
    assert ours.lock_byte(LockByte.NEXT)

    ours.close()
    theirs.close()
    assert list(tmp_path.iterdir()) == []


def test_a_standby_takes_the_lock_of_the_file_that_is_there(tmp_path: Path) -> None:
    ours, theirs, third = lock(tmp_path), lock(tmp_path), lock(tmp_path)
    assert ours.take()
    ours.close()
    assert theirs.take()
    assert not third.take(), "the file that the first owner removed has no lock of worth"
    theirs.close()
    assert third.take()
    third.close()


def test_a_file_that_was_replaced_is_opened_without_its_lock_and_signature(tmp_path: Path) -> None:
    ours = lock(tmp_path)
    assert ours.take()
    ours.sign()
    lock_path(tmp_path).unlink()
    theirs = lock(tmp_path)
    assert theirs.take()

    ours.open_current()
    assert not ours.is_ours
    assert not ours.signed_since
    assert not ours.take()
    assert theirs.is_ours
    ours.close()
    theirs.close()


def test_an_owner_signs_with_its_version_and_host_and_whether_it_ends(tmp_path: Path) -> None:
    ours, theirs = lock(tmp_path), lock(tmp_path)
    assert str(theirs.owner()) == "an agent that has not signed its lock"
    ours.sign()
    signature = theirs.owner()
    assert (signature.version, signature.pid, signature.ends) == (__version__, os.getpid(), False)
    ours.sign(ends=True)
    assert theirs.owner().ends
    assert theirs.owner().since == signature.since
    ours.close()
    theirs.close()


def test_a_file_system_without_byte_locks_has_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> bytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    ours, theirs = lock(tmp_path), lock(tmp_path)
    monkeypatch.setattr(fcntl, "fcntl", unsupported)
    assert ours.lock_byte(LockByte.NEXT)
    assert theirs.lock_byte(LockByte.NEXT)
    assert not ours.is_byte_locked(LockByte.NEXT)
    assert ours.take()
    assert not theirs.take()
    theirs.close()
    ours.close()
