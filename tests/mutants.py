"""Samples random faults and reports those that no test notices: ``make mutants``.

A fault is one small change of the syntax tree: a condition negated, a comparison reversed, an
operand replaced, a call left out, an assigned or returned value replaced by None. Each sampled
fault is put into a copy of the project. Then the tests run from near to far: the test files of the
module, those of its room (for the kubelet's room also those of the outputs, which reach it), those
of the whole agent or of people's half. A fault that all of them pass survives.

``--count 200 --seed 7`` choose how many and which; ``npu_agent/core`` limits them to a path. A
survivor is a missing test or an equivalent program: read it before you write a test.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
COPIED = ("npu_agent", "tests", "bench", "docs", "k8s", "packaging", "protos", "pyproject.toml")
COPIED_PATTERN = "*.md"
WORKERS = 2
DEADLINE = 600.0
"""Seconds for one run of tests. A fault that makes them hang counts as noticed."""

REVERSED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
REPLACED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of one place in one file."""

    file: str
    """Relative to the project."""
    line: int
    start: int
    end: int
    """Bytes in the file that `new` replaces."""
    new: str
    old: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old[:80]!r} -> {new[:80]!r}"


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults that can be made in a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[start:end].decode()
        found.append(Fault(file, node.lineno, start, end, new, old))
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Each node inside functions that can be changed, with its new text."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _changes_within(statement)
        elif isinstance(node, ast.ClassDef | ast.If):
            yield from _changes(node)


def _changes_within(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.JoinedStr):
        return  # Python 3.11 gives no true positions inside an f-string
    if isinstance(node, ast.expr | ast.stmt) and (new := _changed(node)):
        yield node, new
    for condition in _conditions(node):
        if not _changed(condition):
            yield condition, f"(not {ast.unparse(condition)})"
    match node:
        case ast.AnnAssign(value=value):
            children: list[ast.AST] = [value] if value else []
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            children = list(body)
        case _:
            children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _changes_within(child)


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.comprehension(ifs=ifs):
            return ifs
    return []


def _changed(node: ast.expr | ast.stmt) -> str | None:
    """The text of `node` with a fault; None: no fault of it is known."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({ast.unparse(operand)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in REVERSED:
            turned = ast.Compare(left=left, ops=[REVERSED[type(op)]()], comparators=[right])
            return f"({ast.unparse(turned)})"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            return f"({ast.unparse(ast.BoolOp(op=other, values=values))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in REPLACED:
            turned_op = ast.BinOp(left=left, op=REPLACED[type(op)](), right=right)
            return f"({ast.unparse(turned_op)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() | float() as value):
            return repr(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "pass"
        case ast.Assign(targets=targets, value=value) if not _is_none(value):
            return " = ".join([*map(ast.unparse, targets), "None"])
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            return "return None"
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def runs_for(file: str, root: Path = ROOT) -> list[list[str]]:
    """The runs of tests for a file, the nearest first."""
    module = Path(file).relative_to("npu_agent")
    room = Path("tests", module.parent)
    near = sorted((root / room).glob(f"test_{module.stem}*.py"))
    whole = sorted((root / "tests").glob("test_agent*.py"))
    if module.parts[0] == "people":  # the agent imports none of it
        whole = [root / "tests/people"]
    runs = [[str(path.relative_to(root)) for path in near]]
    runs += [[str(room)]] if module.parent.name and (root / room).is_dir() else []
    runs += [["tests/outputs"]] if module.parts[0] == "kubelet" else []
    return [run for run in [*runs, [str(path.relative_to(root)) for path in whole]] if run]


def noticed(fault: Fault, copy: Path) -> bool:
    """Whether a test fails with this fault in this copy of the project."""
    path = copy / fault.file
    good = path.read_bytes()
    path.write_bytes(good[: fault.start] + fault.new.encode() + good[fault.end :])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return any(
            subprocess.run(
                [*command, *run], cwd=copy, env=env, capture_output=True, timeout=DEADLINE
            ).returncode
            not in (0, 5)  # 5: no test was chosen
            for run in runs_for(fault.file, copy)
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(good)


def copy_project(target: Path) -> Path:
    """A copy of what the tests need."""
    for source in [*(ROOT / name for name in COPIED), *ROOT.glob(COPIED_PATTERN)]:
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / source.name, ignore=ignored)
        else:
            shutil.copy(source, target)
    waits = target / "tests/until.py"  # most faults make tests wait for what never comes
    waits.write_text(waits.read_text().replace("DEADLINE = 30.0", "DEADLINE = 8.0"))
    return target


def main(argv: list[str] | None = None) -> int:
    """Tries a sample of faults and prints which survive; returns 0 whatever the score."""
    parser = argparse.ArgumentParser(
        prog="make mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("path", nargs="*", default=["npu_agent"], help="files or folders")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(argv)
    paths = [ROOT / name for name in chosen.path]
    every = [
        fault
        for path in paths
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
        if "wire" not in file.parts
        for fault in faults_of(str(file.relative_to(ROOT)), file.read_text())
    ]
    sample = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))
    print(f"{len(sample)} of {len(every)} faults, seed {chosen.seed}", flush=True)
    survivors = []
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="npu-mutants-") as temporary:
        for number in range(WORKERS):
            target = Path(temporary, str(number))
            target.mkdir()
            copies.put(copy_project(target))

        def tried(fault: Fault) -> bool:
            copy = copies.get()
            try:
                return noticed(fault, copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(WORKERS) as pool:
            for fault, good in zip(sample, pool.map(tried, sample), strict=True):
                print("noticed " if good else "SURVIVED", fault, flush=True)
                if not good:
                    survivors.append(fault)
    print(f"\n{len(sample) - len(survivors)} of {len(sample)} noticed; survivors:")
    print("\n".join(map(str, survivors)) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
