"""Checks one file, or what was changed: ``python -m tests.check [FILE ...]``, as `make check`.

Format, lint, types, and the tests that belong to the file by its place: tests/ mirrors the
package. Also those that compare what is written elsewhere with the file: rows of pages, golden
files. It is for the seconds between two edits; `make lint test` has the last word.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APART = ("e2e", "k8s", "packaging")
"""Folders of tests/ with targets of their own."""
SUFFIXES = (".py", ".md")
_PAGES = ("tests/docs/test_configuration.py", "tests/docs/test_translations.py")
_METRICS = ("tests/outputs/prometheus/test_docs.py", "tests/outputs/prometheus/test_golden.py")
_LABELS = ("tests/outputs/labels/test_compute.py", "tests/docs/test_labels.py")
ELSEWHERE: Mapping[str, Sequence[str]] = {
    "npu_agent/core/vendor.py": (*_METRICS, *_LABELS),
    "npu_agent/vendors/*/metrics.py": _METRICS,
    "npu_agent/outputs/prometheus/*.py": _METRICS,
    "npu_agent/vendors/*/labels.py": _LABELS,
    "npu_agent/outputs/labels/*.py": _LABELS,
    "npu_agent/vendors/*/families.py": _PAGES,
    "npu_agent/config/schema.py": _PAGES,
    "npu_agent/core/kinds.py": ("tests/wording/test_wording.py", "tests/docs/test_cli.py"),
    "npu_agent/core/timeline.py": ("tests/wording/test_wording.py", "tests/docs/test_cli.py"),
    "npu_agent/outputs/web/*": (
        "tests/outputs/web/test_page.py",
        "tests/outputs/web/test_status.py",
    ),
    "docs/*.md": (*_PAGES, "tests/docs/test_links.py"),
    "README*.md": ("tests/docs/test_readme.py", "tests/docs/test_links.py"),
}
"""The tests that hold pages and golden files to a file, by its path's pattern."""


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if something is wrong, and 2 if a file cannot be checked."""
    files = [Path(each) for each in arguments] or changed()
    for file in files:
        if file.suffix not in SUFFIXES or not (ROOT / file).is_file():
            print(f"make check: {file}: no Python file or page of this project", file=sys.stderr)
            return 2
    if not files:
        print("make check: no Python file or page differs from the last commit: FILE=... names one")
        return 0
    named = [str(file) for file in files]
    python = [name for name in named if name.endswith(".py")]
    found = modules_for(files)
    commands: list[tuple[str, ...]] = []
    if python:
        commands += [
            ("ruff", "format", "--check", *python),
            ("ruff", "check", *python),
            ("mypy", *python),
        ]
    if found:
        commands.append(("pytest", "-n0", *map(str, found)))
    failed = [command[0] for command in commands if not passes(command)]
    tests = ", ".join(map(str, found)) or "there are none of its own"
    print(f"\n{', '.join(named)}\ntests: {tests}")
    print(f"failed: {', '.join(dict.fromkeys(failed))}" if failed else "good")
    return 1 if failed else 0


def passes(command: Sequence[str]) -> bool:
    """Runs a module of this interpreter."""
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode == 0


def changed() -> list[Path]:
    """The Python files and pages that differ from the last commit, new ones too."""
    ask = ("git", "status", "--porcelain", "--untracked-files=all")
    lines = subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = (line[3:].rpartition(" -> ")[2].strip('"') for line in lines.splitlines())
    files = (Path(name) for name in names if name.endswith(SUFFIXES))
    return [file for file in files if (ROOT / file).is_file()]


def modules_for(files: Iterable[Path]) -> list[Path]:
    """The test modules that belong to these files by their place, each once.

    ``npu_agent/core/pool.py`` has ``tests/core/test_pool.py``, and also
    ``tests/core/test_pool_names.py`` if there is one; a test module has itself. What `ELSEWHERE`
    has for a file comes behind them.
    """
    modules = [module for file in files for module in (*_modules_for(file), *_elsewhere(file))]
    return [*dict.fromkeys(modules)]


def _elsewhere(file: Path) -> Iterator[Path]:
    for pattern, modules in ELSEWHERE.items():
        if fnmatch(str(file), pattern):
            yield from map(Path, modules)


def _modules_for(file: Path) -> list[Path]:
    top, *inner = file.parts
    if top == "tests":
        alone = inner[0] not in APART and file.name.startswith("test_")
        return [file] if alone else []
    if top != "npu_agent":
        return []
    directory = Path("tests", *inner[:-1])
    here = (ROOT / directory).glob(f"test_{file.stem}*.py")
    return sorted(each.relative_to(ROOT) for each in here if _belongs(each.stem, file.stem))


def _belongs(test: str, stem: str) -> bool:
    return test == f"test_{stem}" or test.startswith(f"test_{stem}_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
