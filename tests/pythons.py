"""Runs the tests on every Python that npu-agent is for: ``python tests/pythons.py [options]``.

All that are installed run at the same time, each with two workers: the tests wait for about half
of their time, so that three interpreters take little longer than one after the other worker.
In CI one of them is that of a clean Debian, as a newcomer has it: tests/newcomer.py.
An interpreter is looked for on PATH and among pyenv's. Root on Debian takes one that Debian's
stable release has not got from the unstable one; what else is not installed is left out, and named.
Each but the one that runs this gets a virtual environment below $NPU_AGENT_CACHE (default:
~/.cache/npu-agent), made once from requirements/dev.txt.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
UNSTABLE = ("3.14",)
"""Those of Debian's unstable release."""
NEWCOMER = "3.13"
"""That of Debian 13."""
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
CACHE = Path(os.environ.get("NPU_AGENT_CACHE") or Path.home() / ".cache" / "npu-agent")


def main() -> int:
    """Returns 1 if the tests failed on one of them."""
    found = {OWN: sys.executable}
    for version in VERSIONS:
        if version == NEWCOMER and os.environ.get("CI"):
            print(f"Python {version}: in a clean Debian", flush=True)
            found[version] = ""
            continue
        if version == OWN:
            continue
        python = interpreter(version) or (version in UNSTABLE and unstable(version)) or None
        if python is None:
            print(f"Python {version}: not installed, left out", flush=True)
        else:
            print(f"Python {version}: {python}", flush=True)
            found[version] = environment(version, python)
    failed = run(found)
    print(f"failed on Python {', '.join(failed)}" if failed else f"good on {', '.join(found)}")
    return 1 if failed else 0


def run(pythons: dict[str, str]) -> list[str]:
    """Runs the tests on all at once; the output of each comes when it is done."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        running = {}
        for version, python in pythons.items():
            output = Path(directory, version)
            # Files that pytest keeps from run to run are not shared between runs.
            command = [
                python,
                "-m",
                "tests.again" if os.environ.get("CI") else "pytest",
                "-n2",
                "-o",
                f"cache_dir={directory}/cache-{version}",
                *sys.argv[1:],
            ]
            if not python:
                command = [sys.executable, "-m", "tests.newcomer"]
            environ = os.environ | {"PYTHONPATH": str(ROOT)}
            with output.open("wb") as file:
                running[version] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environ,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        failed = []
        for version, process in running.items():
            code = process.wait()
            took = time.monotonic() - began
            print(f"--- Python {version}, after {took:.0f} s", flush=True)
            print(
                Path(directory, version).read_text(errors="replace", encoding="utf-8"), flush=True
            )
            if code:
                failed.append(version)
    return failed


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


def unstable(version: str) -> str | None:
    """That of Debian's unstable release, with the C library that it needs, into the cache."""
    home = CACHE / f"python-{version}"
    python, libraries = home / "usr" / "bin" / f"python{version}", home / "usr" / "lib"
    if python.exists():
        return str(python)
    mirror = os.environ.get("NPU_AGENT_DEBIAN_MIRROR")
    include = f"--include=python{version},python{version}-venv"
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        made, root = Path(directory, "made"), Path(directory, "root")
        options = ("--foreign", "--variant=minbase", include)
        try:
            _quiet("debootstrap", *options, "sid", root, *([mirror] if mirror else []))
            for package in root.glob("var/cache/apt/archives/*.deb"):
                _quiet("dpkg-deb", "--extract", package, made)
            (loader,) = made.glob("usr/lib/*/ld-linux-*.so.*")
            loader = libraries / loader.relative_to(made / "usr" / "lib")
            paths = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent)
            _quiet("patchelf", *paths, made / python.relative_to(home))
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"Python {version}: not to be had from Debian: {error}", flush=True)
            return None
        made.rename(home)
    return str(python)


def _quiet(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def environment(version: str, python: str) -> str:
    """The Python of a virtual environment with what the tests need; made if it is missing."""
    pins = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    venv = CACHE / "venvs" / f"{version}-{pins}"
    ours = str(venv / "bin" / "python")
    ready = venv / "ready"
    if not ready.exists():
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", venv], check=True)
        pip = [sys.executable, "-m", "pip", "--python", ours, "install", "--quiet"]
        options = ["--disable-pip-version-check", "--require-hashes"]
        subprocess.run([*pip, *options, "-r", REQUIREMENTS], check=True)
        ready.touch()
    return ours


if __name__ == "__main__":
    sys.exit(main())
