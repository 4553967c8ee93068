"""The image and the binary, built once for each state of what they are made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from npu_agent.people import simulator
from tests.cluster import ensure_packages, images
from tests.cluster.cache import cache_dir, cached, locked
from tests.kube.helpers import Authority, authority
from tests.packaging.container import install
from tests.packaging.host import Host

PROJECT = images.PROJECT
COMMITTED_AT = 1_700_000_000
"""Seconds since 1970: when the source that is built here was "committed"."""

BUILD_DEADLINE = 600.0
"""Seconds; guards against hanging."""


def pytest_configure() -> None:
    if os.geteuid() != 0:
        pytest.exit("the packaging tests build and run containers as root: sudo make packaging", 1)


@pytest.fixture(scope="session")
def image() -> Path:
    """A directory: the same image built twice as OCI layouts `one` and `two`, what the first of
    them is made of as `rootfs`, and the SBOM that was written beside it.
    """
    ensure_packages()
    beside = [PROJECT / "packaging" / name for name in ("image.sh", "provenance.py")]
    files = [*images._context(PROJECT), *beside]
    base = images.base()

    def make(directory: Path) -> None:
        context = _committed(files, directory / "context")
        with locked("buildah"):
            for name in ("one", "two"):
                _build(context, base, f"localhost/npu-agent-packaging:{name}", directory / name)
        for kind in ("spdx", "provenance"):
            shutil.copy(context / "dist" / f"npu-agent-image.{kind}.json", directory)
        shutil.rmtree(context)

    return cached("packaged-image", [_digests(files), base, _digests([Path(__file__)])], make)


def _build(context: Path, base: str, name: str, target: Path) -> None:
    """By `make image`'s script, with the machine's pip settings and buildah storage of e2e."""
    pip = context.parent / "pip.conf"
    pip.write_text(images._pip_settings(), encoding="utf-8")
    volumes = [f"{pip}:/etc/pip.conf:ro", f"{images.CERTIFICATES}:{images.CERTIFICATES}:ro"]
    images._buildah("--version")  # makes the settings that $CONTAINERS_CONF names
    storage = cache_dir() / "buildah"
    tool = f"buildah --storage-driver vfs --root {storage}/root --runroot {storage}/run"
    flags = "--isolation chroot --network host --layers=false"
    environment = {
        **os.environ,
        "CONTAINERS_CONF": f"{storage}/containers.conf",
        "TOOL": tool,
        "BASE": base,
        "IMAGE": name,
        "SOURCE": "https://example.com/npu-agent",
        "FLAGS": " ".join([flags, *(f"--volume={volume}" for volume in volumes)]),
    }
    try:
        _run(["sh", str(context / "packaging" / "image.sh")], environment)
        images._buildah("push", name, f"oci:{target}:{name}")
        if target.name == "one":
            container = images._buildah("from", "--pull-never", name)
            try:
                mounted = images._buildah("mount", container)
                # cp keeps device nodes what they are; copytree would read /dev/full for ever.
                _run(["cp", "--archive", mounted, str(target.with_name("rootfs"))], environment)
            finally:
                images._buildah("rm", container)
    finally:
        images._buildah("rmi", name, check=False)
        pip.unlink()


@pytest.fixture(scope="session")
def binary() -> Path:
    """A directory: the binary and its SBOM, and `rootfs` with it, the C library and no Python."""

    def finish(directory: Path) -> None:
        root = directory / "rootfs"
        install(root, *_files_of("libc6", "zlib1g"), Path("/bin/busybox"))
        (root / "usr" / "local" / "bin").mkdir(parents=True)
        shutil.copy(directory / "npu-agent", root / "usr" / "local" / "bin")
        for name in ("dev", "etc", "host", "proc", "sys", "tmp"):
            (root / name).mkdir(exist_ok=True)

    return _frozen("binary", "run.txt", finish)


@pytest.fixture(scope="session")
def krew() -> Path:
    """A directory: krew's manifest of the plugin, and its archive."""
    return _frozen("krew", "kubectl.txt", lambda _: None)


def _frozen(name: str, lock: str, finish: Callable[[Path], None]) -> Path:
    """What packaging/NAME.sh makes by PyInstaller, in an environment with what is locked."""
    ensure_packages()
    locks = [PROJECT / "requirements" / each for each in (lock, "binary.txt")]
    files = [
        *images._context(PROJECT),
        *(path for path in PROJECT.glob("packaging/*") if path.is_file()),
        *locks,
    ]

    def environment(directory: Path) -> None:
        _run([sys.executable, "-m", "venv", str(directory)])
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--require-hashes", *(f"-r{lock}" for lock in locks)])

    def make(directory: Path) -> None:
        venv = cached("packaging-venv", [_digests(locks), sys.version], environment)
        context = _committed(files, directory / "context")
        script = str(context / "packaging" / f"{name}.sh")
        _run(["sh", script, str(venv / "bin" / "python"), str(directory)])
        finish(directory)
        shutil.rmtree(context)

    of = [_digests(files), sys.version, _digests([Path(__file__)])]
    return cached(f"packaged-{name}", of, make)


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """What the API server's certificate is signed by."""
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def host() -> Iterator[Host]:
    """A host with two simulated cards and the kubelet's directories."""
    with tempfile.TemporaryDirectory(prefix="npu-", dir="/tmp") as directory:
        made = Host(Path(directory))
        for path in (made.plugins, made.pod_resources, made.settings):
            path.mkdir(parents=True)
        simulator.make(made.root, simulator.parse_cards("warboy=2"), plain_nodes=True)
        yield made


def _files_of(*packages: str) -> list[Path]:
    """The shared libraries of Debian packages."""
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True)
    names = (name for name in listed.stdout.splitlines() if ".so" in Path(name).name)
    return [path for path in map(Path, names) if path.is_file()]


def _committed(files: list[Path], target: Path) -> Path:
    """A checkout with these files of the project and one commit."""
    for path in files:
        copy = target / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    date = f"@{COMMITTED_AT} +0000"
    environment = {**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "-q"], ["add", "-A", "-f"], [*who, "commit", "-q", "-m", "test"]):
        _run(["git", "-C", str(target), *command], environment)
    return target


def _run(command: list[str], environment: Mapping[str, str] = os.environ) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=BUILD_DEADLINE
    )
    output = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    assert done.returncode == 0, f"{' '.join(command)}:\n{output}"


def _digests(files: list[Path]) -> list[list[str]]:
    return [[str(path), hashlib.sha256(path.read_bytes()).hexdigest()] for path in sorted(files)]
