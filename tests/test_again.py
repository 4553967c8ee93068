"""The second chance of CI: for few tests, once, and never unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import MOST
from tests.processes import environment

TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    file = Path("seen", str(number))
    seen = file.exists()
    file.touch()
    assert seen and {passes}

def test_another():
    pass
"""


@pytest.mark.parametrize(
    ("count", "passes", "code", "runs"),
    [(MOST, True, 0, 2), (1, False, 1, 2), (MOST + 1, True, 1, 1)],
)
def test_a_second_chance(tmp_path: Path, count: int, passes: bool, code: int, runs: int) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_them.py").write_text(
        TESTS.format(count=count, passes=passes), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.again", "test_them.py"],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("Once more" in done.stdout) is (runs == 2)
    assert ("UNSTEADY" in done.stdout) is (runs == 2 and code == 0)
    assert "test_another" not in done.stdout
