"""Images without a registry: built with buildah, kept as OCI archives in the cache.

buildah gets a storage of its own in the cache directory, and isolation that needs neither a
daemon nor user namespaces, so the host's own images are not touched.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import settings
from .build import KUBERNETES, NEWEST, BuildError, ensure_binaries, ensure_packages
from .cache import cache_dir, cached, locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

PROJECT = Path(__file__).parents[2]
SUITE = "bookworm"
"""The Debian release that the test's base image is made of: Python 3.11, the oldest supported."""
BASE_PACKAGES = ("python3", "python3-venv")
CERTIFICATES = Path("/etc/ssl/certs")
PAUSE_C = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
static void reap(int number) { while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap);
                 for (;;) pause(); }
"""


@dataclass(frozen=True)
class Image:
    name: str
    archive: Path


def pause() -> Image:
    """What holds a Pod's namespaces: a static program that waits and reaps."""

    def make(directory: Path) -> None:
        (directory / "pause.c").write_text(PAUSE_C, encoding="utf-8")
        _run("gcc", "-static", "-Os", "-o", f"{directory}/pause", f"{directory}/pause.c")
        with _from("scratch") as container:
            _buildah("copy", container, f"{directory}/pause", "/pause")
            _buildah("config", "--entrypoint", '["/pause"]', container)
            _export(container, settings.PAUSE_IMAGE, directory)

    return _image(settings.PAUSE_IMAGE, PAUSE_C, make)


def workload(name: str = "localhost/workload:1") -> Image:
    """What a test Pod runs: a static busybox with all its commands; sleeps without a command.

    Each name has an image of its own: once a kubelet 1.35 or newer has pulled an image, it starts
    no Pod that names the same image otherwise.
    """

    def make(directory: Path) -> None:
        shutil.copy("/bin/busybox", directory / "busybox")
        with _from("scratch") as container:
            _buildah("copy", container, f"{directory}/busybox", "/bin/busybox")
            _buildah(
                *["run", "--isolation", "chroot", container, "--"],
                *["/bin/busybox", "--install", "-s", "/bin"],
            )
            named = ("--label", f"name={name}")
            _buildah("config", *named, "--env", "PATH=/bin", "--cmd", "sleep 1000000", container)
            _export(container, name, directory)

    ensure_packages()
    return _image(name, _digest(Path("/bin/busybox")), make)


def scheduler() -> Image:
    """The scheduler of the cluster's own build, by the name that k8s/ has and the public path."""
    name = f"registry.k8s.io/kube-scheduler:v{NEWEST}"
    program = ensure_binaries(KUBERNETES)["kube-scheduler"]

    def make(directory: Path) -> None:
        with _from("scratch") as container:
            _buildah("copy", container, str(program), "/usr/local/bin/kube-scheduler")
            _buildah("config", "--env", "PATH=/usr/local/bin", container)
            _export(container, name, directory)

    ensure_packages()
    return _image(name, KUBERNETES.checksum, make)


def base() -> str:
    """The name, in our buildah storage, of the Debian-with-Python that the agent image is built on.

    Stands in for the public Python image that the Containerfile names, which takes a registry.
    Debian's mirror is debootstrap's own choice, or `$NPU_AGENT_DEBIAN_MIRROR`.
    """
    name = f"localhost/python-base:{'-'.join((SUITE, *BASE_PACKAGES))}"
    with locked("python-base"):
        if _buildah("images", "--quiet", name, check=False):
            return name
        logger.info("making a base image of Debian %s: about a minute, but only this once", SUITE)
        (cache_dir() / "tmp").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir() / "tmp") as scratch:
            root = Path(scratch, "root")
            mirror = os.environ.get("NPU_AGENT_DEBIAN_MIRROR")
            _run(
                *[
                    "debootstrap",
                    "--variant=minbase",
                    f"--include={','.join(BASE_PACKAGES)}",
                    SUITE,
                    str(root),
                ],
                *([mirror] if mirror else []),
            )
            for leftover in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "var/log"):
                shutil.rmtree(root / leftover)
                (root / leftover).mkdir()
            with _from("scratch") as container:
                _buildah("copy", container, str(root), "/")
                _buildah("config", "--env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", container)
                _buildah("config", "--cmd", "python3", container)
                _buildah("commit", "--quiet", container, name)
    return name


def agent(project: Path = PROJECT, name: str = "localhost/npu-agent:test") -> Image:
    """The project's image, built from its Containerfile as it is now.

    Built again only when a file changes that the build sees, which .containerignore says.
    """
    files = _context(project)
    key = [[str(path.relative_to(project)), _digest(path)] for path in files]

    def make(directory: Path) -> None:
        context = directory / "context"
        for path in files:
            target = context / path.relative_to(project)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        pip = directory / "pip.conf"
        pip.write_text(_pip_settings(), encoding="utf-8")
        # The machine's own trust and index, for the build alone: no layer gets any of it.
        volumes = [f"{pip}:/etc/pip.conf:ro", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
        _buildah(
            *["build", "--isolation", "chroot", "--network", "host", "--layers=false"],
            *[f"--volume={volume}" for volume in volumes],
            *["--build-arg", f"BASE={base()}", "--tag", name, str(context)],
        )
        try:
            _buildah("push", name, f"oci-archive:{directory}/image.tar:{name}")
        finally:
            _buildah("rmi", name)
        pip.unlink()
        shutil.rmtree(context)

    return _image(name, [key, base()], make)


def _image(name: str, key: object, make: Callable[[Path], None]) -> Image:
    short = name.rpartition("/")[2].partition(":")[0]

    def make_locked(directory: Path) -> None:
        with locked("buildah"):
            make(directory)

    key = [key, _digest(Path(__file__))]
    return Image(name, cached(f"image-{short}", key, make_locked) / "image.tar")


def _context(project: Path) -> list[Path]:
    lines = (project / ".containerignore").read_text(encoding="utf-8").split("\n")
    wanted = [project / line[1:] for line in lines if line.startswith("!")]
    files = [path for top in wanted for path in ([top] if top.is_file() else top.rglob("*"))]
    return sorted(p for p in files if p.is_file() and "__pycache__" not in p.parts)


def _pip_settings() -> str:
    """This machine's pip settings for reaching an index, as a pip.conf.

    pip's own question to its configuration, as it may be in files and in the environment.
    """
    wanted = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout")
    lines = ["[global]", "disable-pip-version-check = true", "root-user-action = ignore"]
    for key in wanted:
        value = subprocess.run(
            ["python3", "-m", "pip", "config", "get", f"global.{key}"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        value = os.environ.get(f"PIP_{key.replace('-', '_').upper()}", value)
        lines += [f"{key} = {value}"] if value else []
    return "\n".join(lines) + "\n"


@contextmanager
def _from(image: str) -> Iterator[str]:
    container = _buildah("from", image)
    try:
        yield container
    finally:
        _buildah("rm", container)


def _export(container: str, name: str, directory: Path) -> None:
    _buildah("commit", "--quiet", container, f"oci-archive:{directory}/image.tar:{name}")


def _buildah(*arguments: str, check: bool = True) -> str:
    storage = cache_dir() / "buildah"
    storage.mkdir(parents=True, exist_ok=True)
    place = ["--root", f"{storage}/root", "--runroot", f"{storage}/run"]
    # Else it makes itself a directory in the host's /etc.
    (storage / "containers.conf").write_text(
        f'[network]\nnetwork_config_dir = "{storage}/cni"\n', encoding="utf-8"
    )
    env = {**os.environ, "CONTAINERS_CONF": f"{storage}/containers.conf"}
    return _run("buildah", "--storage-driver", "vfs", *place, *arguments, check=check, env=env)


def _run(*command: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if check and done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise BuildError(f"{' '.join(command)}:\n{output}")
    return done.stdout.strip()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
