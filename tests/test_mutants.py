"""`make mutants` makes faults that are programs, and chooses the tests that should notice them."""

from __future__ import annotations

import ast
from random import Random

from tests.mutants import ROOT, faults_of, runs_for

SOURCE = '''
LIMIT = 5

def f(a, b):
    """A text."""
    if a and not b:
        log(a)
    c = a + 1 if b else g(a < b)
    return [x for x in c if x]
'''


def applied(source: str) -> list[str]:
    whole = source.encode()
    return [
        (whole[: one.start] + one.new.encode() + whole[one.end :]).decode()
        for one in faults_of("f.py", source)
    ]


def test_each_kind_of_fault_is_made() -> None:
    changed = [
        line.strip()
        for program in applied(SOURCE)
        for line, before in zip(program.splitlines(), SOURCE.splitlines(), strict=True)
        if line != before
    ]
    assert changed == [
        "if (a or not b):",
        "if a and bool(b):",
        "pass",
        "c = None",
        "c = a + 1 if (not b) else g(a < b)",
        "c = (a - 1) if b else g(a < b)",
        "c = a + 2 if b else g(a < b)",
        "c = a + 1 if b else g((a > b))",
        "return None",
        "return [x for x in c if (not x)]",
    ]


def test_a_faulty_file_is_a_program() -> None:
    files = sorted((ROOT / "npu_agent").rglob("*.py"))
    for file in Random(1).sample(files, 20):
        for program in Random(1).sample(every := applied(file.read_text()), min(20, len(every))):
            ast.parse(program)


def test_the_tests_run_from_near_to_far() -> None:
    runs = runs_for("npu_agent/core/pool.py")
    assert runs[0] == ["tests/core/test_pool.py"]
    assert runs[1] == ["tests/core"]
    assert "tests/test_agent.py" in runs[-1]
