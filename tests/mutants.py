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
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
COPIED = ("npu_agent", "tests", "bench", "docs", "k8s", "packaging", "protos", "pyproject.toml")
COPIED_PATTERN = "*.md"
WORKERS = 2
DEADLINE = 600.0
"""Seconds for one run of tests. A fault that makes them hang counts as noticed."""

Node: TypeAlias = ast.expr | ast.stmt
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
    place: int
    """Which of the file's changes it is."""
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old[:80]!r} -> {self.new[:80]!r}"


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults that can be made in a file."""
    return [
        Fault(file, place, old.lineno, ast.unparse(old), ast.unparse(new))
        for place, (old, new) in enumerate(_changes(ast.parse(source)))
    ]


def with_fault(source: str, place: int) -> str:
    """The source with one of its faults."""
    tree = ast.parse(source)
    old, new = list(_changes(tree))[place]

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    return ast.unparse(Change().visit(tree))


def _changes(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[Node, Node]]:
    """Each node inside functions that can be changed, and what is in its place."""
    if inside and isinstance(tree, ast.expr | ast.stmt) and (new := _changed(tree)):
        yield tree, new
    for condition in _conditions(tree) if inside else ():
        if not _changed(condition):
            yield condition, ast.UnaryOp(op=ast.Not(), operand=condition)
    for name, value in ast.iter_fields(tree):
        if name not in ("annotation", "decorator_list", "returns") and not isinstance(
            value, ast.arguments
        ):
            function = name == "body" and isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    yield from _changes(child, inside=inside or function)


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.comprehension(ifs=ifs):
            return ifs
    return []


def _changed(node: ast.expr | ast.stmt) -> Node | None:
    """`node` with a fault; None: no fault of it is known."""
    nothing = ast.Constant(value=None)
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ast.Call(func=ast.Name(id="bool"), args=[operand], keywords=[])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in REVERSED:
            return ast.Compare(left=left, ops=[REVERSED[type(op)]()], comparators=[right])
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(op=ast.Or() if isinstance(op, ast.And) else ast.And(), values=values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in REPLACED:
            return ast.BinOp(left=left, op=REPLACED[type(op)](), right=right)
        case ast.Constant(value=bool() as value):
            return ast.Constant(value=not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value=value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            return ast.Pass()
        case ast.Assign(targets=targets, value=value) if not _is_none(value):
            return ast.Assign(targets=targets, value=nothing, lineno=node.lineno)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            return ast.Return(value=nothing)
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
    good = path.read_text(encoding="utf-8")
    path.write_text(with_fault(good, fault.place), encoding="utf-8")
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
        path.write_text(good, encoding="utf-8")


def copy_project(target: Path) -> Path:
    """A copy of what the tests need."""
    for source in [*(ROOT / name for name in COPIED), *ROOT.glob(COPIED_PATTERN)]:
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / source.name, ignore=ignored)
        else:
            shutil.copy(source, target)
    waits = target / "tests/until.py"  # most faults make tests wait for what never comes
    waits.write_text(
        waits.read_text(encoding="utf-8").replace("DEADLINE = 30.0", "DEADLINE = 8.0"),
        encoding="utf-8",
    )
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
        for fault in faults_of(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
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
