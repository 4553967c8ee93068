"""Runs the tests on every Python that npu-agent is for: ``python tests/pythons.py [options]``.

An interpreter is looked for on PATH and among pyenv's. Each gets a virtual environment below
$NPU_AGENT_CACHE (default: ~/.cache/npu-agent), made once from requirements/dev.txt.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "dev.txt"


def main() -> int:
    """Returns 1 if a run failed or an interpreter is missing."""
    failed = []
    for version in VERSIONS:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not found", flush=True)
            failed.append(version)
            continue
        print(f"Python {version}: {python}", flush=True)
        command = [environment(version, python), "-m", "pytest", *sys.argv[1:]]
        if subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode:
            failed.append(version)
    print(f"failed on Python {', '.join(failed)}" if failed else "good on all of them")
    return 1 if failed else 0


def interpreter(version: str) -> str | None:
    """The first one found that is of this version."""
    for candidate in candidates(version):
        # Asked, and not believed: pyenv puts a python3.12 on PATH that only says it is missing.
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            answer = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        except OSError:
            continue
        if answer.stdout.strip() == version:
            return candidate
    return None


def candidates(version: str) -> Iterator[str]:
    """Where it may be."""
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True))


def environment(version: str, python: str) -> str:
    """The Python of a virtual environment with what the tests need; made if it is missing."""
    cache = Path(os.environ.get("NPU_AGENT_CACHE") or Path.home() / ".cache" / "npu-agent")
    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    venv = cache / "venvs" / f"{version}-{pins}"
    ours = str(venv / "bin" / "python")
    ready = venv / "ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
        pip = [ours, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "-r", REQUIREMENTS], check=True)
        ready.touch()
    return ours


if __name__ == "__main__":
    sys.exit(main())
