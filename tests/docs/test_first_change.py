"""docs/dev/first-change.md works as written: its patches fit, its tests fail and then pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.check import modules_for

from .pages import ROOT, page
from .typed import commands

PAGE = page("docs/dev/first-change.md")
LEFT_OUT = {
    "make demo": "tests/people/commands/test_demo.py runs the tour",
    "make lint test": "CI runs it",
}
"""Why a command of the page is not run here."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A commit of this checkout, with its environment and its mypy cache."""
    made = tmp_path_factory.mktemp("first-change") / "npu-agent"
    folders = ("docs", "npu_agent", "packaging", "protos", "tests", "bench", "k8s")
    for name in folders:
        unwanted = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / name, made / name, ignore=unwanted, symlinks=True)
    pages = [path.name for path in ROOT.glob("*.md")]
    for name in (*pages, "LICENSE", "Makefile", "pyproject.toml", ".gitignore", "requirements"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, made / name)
    if (cache := ROOT / ".mypy_cache").exists():  # else the types of all that is imported
        shutil.copytree(cache, made / ".mypy_cache")
    (made / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "ready":
            (made / ".venv" / path.name).symlink_to(path)
    (made / ".venv" / "ready").touch()
    run(made, "git init -q && git add -A && git -c user.name=n -c user.email=n@n commit -qm first")
    return made


def run(clone: Path, command: str) -> subprocess.CompletedProcess[str]:
    ours = ("CI", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "UPDATE_GOLDEN")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    environ |= {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        ["sh", "-c", command], cwd=clone, capture_output=True, text=True, env=environ
    )


def passes(clone: Path, command: str) -> str:
    done = run(clone, command)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def fails(clone: Path, command: str) -> str:
    done = run(clone, command)
    assert done.returncode != 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def patch(clone: Path, text: str) -> None:
    (clone / ".git" / "patch").write_text(text, encoding="utf-8")
    passes(clone, "git apply .git/patch")


def blocks(heading: str) -> Iterator[tuple[str, list[str]]]:
    """The language of each block below a heading, and its commands, or its one patch."""
    for language, code in PAGE.below(heading):
        typed = [one for one in commands(language, code) if one not in LEFT_OUT]
        yield language, [code] if language == "diff" else typed


def test_a_driver_that_writes_something_else(clone: Path) -> None:
    (_, [test]), (_, [tests]), (_, tree) = blocks("3. Make the test first")
    (_, [change]), (_, [check]) = blocks("4. Change it")
    tree = [one.replace("/tmp/host", str(clone.parent / "host")) for one in tree]
    if not (clone / ".venv/bin/npu-agent").exists():  # in an environment of `make test-pythons`
        tree = [one.replace(".venv/bin/npu-agent", ".venv/bin/python -m npu_agent") for one in tree]
    patch(clone, test)
    assert "1 failed" in fails(clone, tests)
    assert '"v1.6.0"' in [passes(clone, one) for one in tree][-1]
    patch(clone, change)
    assert "1 passed" in passes(clone, tests)
    assert '"1.6.0"' in passes(clone, tree[-1])
    assert "good" in passes(clone, check).splitlines()


def test_a_new_label(clone: Path) -> None:
    (_, [test]), (_, [change]), (_, [renew, docs, check]) = blocks("A new label")
    assert check == "make check"
    changed = re.findall(r"^--- a/(.+)", change, re.MULTILINE)
    assert "npu_agent/vendors/furiosa/labels.py" in changed
    ours = {"test_compute.py", "test_labels.py", "test_configuration.py"}
    modules = [str(path) for path in modules_for(map(Path, changed)) if path.name in ours]
    assert len(modules) == len(ours)  # `make check` runs these, and more
    tests = f'make test ARGS="-n0 {" ".join(modules)}"'
    patch(clone, test)
    assert "1 failed" in fails(clone, tests)
    patch(clone, change)
    found = fails(clone, tests)
    assert f"  {renew}; git diff" in found
    assert "docs/ko/labels.md is not what" in found
    passes(clone, renew)
    passes(clone, docs)
    passes(clone, tests)


def test_files_that_the_page_names_exist() -> None:
    [(text, where)] = re.findall(r'`grep -rn "(.+)" (\w+)`', PAGE.prose)
    assert any(text in file.read_text(encoding="utf-8") for file in (ROOT / where).rglob("*.py"))
    for name in re.findall(r"`((?:npu_agent|tests)/[\w/.]+)`", PAGE.prose):
        assert (ROOT / name).exists(), name
    [(_, [renew])] = blocks("A new metric")
    assert all((ROOT / name).exists() for name in re.findall(r"tests/[\w/.]+", renew))
