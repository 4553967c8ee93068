from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_agent import files


def test_content_is_the_beginning_of_a_regular_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert files.content(file, 10) is None
    file.write_bytes(b"0123456789")
    assert files.content(file, 10) == b"0123456789"
    assert files.content(file, 4) == b"0123"


def test_content_of_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.content(tmp_path / "pipe", 10)
    with pytest.raises(files.IrregularError, match="a directory"):
        files.content(tmp_path, 10)
    with pytest.raises(NotADirectoryError):
        files.content(tmp_path / "pipe/below", 10)
