"""Checks one file, or what was changed: ``python -m tests.check [FILE ...]``, as `make check`.

Format, lint, types, and the tests that belong to the file by its place: tests/ mirrors the
package. It is for the seconds between two edits; `make lint test` has the last word.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APART = ("e2e", "k8s", "packaging")
"""Folders of tests/ with targets of their own."""


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if something is wrong, and 2 if a file cannot be checked."""
    files = [Path(each) for each in arguments] or changed()
    for file in files:
        if file.suffix != ".py" or not (ROOT / file).is_file():
            print(f"make check: {file}: no Python file of this project", file=sys.stderr)
            return 2
    if not files:
        print("make check: no Python file differs from the last commit: FILE=... names one")
        return 0
    named = [str(file) for file in files]
    found = modules_for(files)
    commands = [
        ("ruff", "format", "--check", *named),
        ("ruff", "check", *named),
        ("mypy", *named),
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
    """The Python files that differ from the last commit, new ones too."""
    ask = ("git", "status", "--porcelain", "--untracked-files=all")
    lines = subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = (line[3:].rpartition(" -> ")[2].strip('"') for line in lines.splitlines())
    files = (Path(name) for name in names if name.endswith(".py"))
    return [file for file in files if (ROOT / file).is_file()]


def modules_for(files: Iterable[Path]) -> list[Path]:
    """The test modules that belong to these files by their place, each once.

    ``npu_agent/core/pool.py`` has ``tests/core/test_pool.py``, and also
    ``tests/core/test_pool_names.py`` if there is one; a test module has itself.
    """
    found: dict[Path, None] = {}
    for file in files:
        for each in _modules_for(file):
            found[each] = None
    return list(found)


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
