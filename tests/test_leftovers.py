"""What a failed test leaves behind."""

import subprocess
import sys
from pathlib import Path

from tests.processes import DEADLINE, environment

TESTS = """
import asyncio, gc, socket, subprocess

def test_a_process_of_asyncio_is_left():
    async def start():
        return await asyncio.create_subprocess_exec("sleep", "20", stdout=subprocess.PIPE)
    left = asyncio.run(start())
    assert not left

def test_a_process_and_a_socket_are_left():
    left = subprocess.Popen(["sleep", "20"]), socket.create_server(("127.0.0.1", 0))
    assert not left

def test_another():
    pass

def test_another_after_that():
    gc.collect()
"""


def test_the_next_tests_do_not_fail(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")
    options = ("-p", "tests.leftovers", "-p", "no:asyncio", "-p", "no:xdist", "test_them.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout
