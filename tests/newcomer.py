"""README's two commands as a newcomer has them: ``python -m tests.newcomer [suite]``, by root.

In a clean root of Debian (default: trixie) with what README asks for and nothing of this machine:
no kubectl, no cache, a clone of what is committed, and a user without rights in an empty home. In
the end the tests of one room run in the locale ko_KR.EUC-KR.

The root is made once by debootstrap (its mirror, or `$NPU_AGENT_DEBIAN_MIRROR`), and copied. The
machine's pip settings and certificates lead to the same package index. A test that fails is run
once more, alone, as in the rest of CI.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster import images
from tests.cluster.cache import cached

PACKAGES = ("ca-certificates", "git", "locales", "make", "python3", "python3-venv")
"""What README asks for, what `git clone` needs, and the sources of the locale."""
LOCALE = "ko_KR.EUC-KR"
USER = "newcomer"
HOME = Path("/home", USER)
AGAIN = "PYTEST='.venv/bin/python -m tests.again'"
COMMANDS = (
    "make demo ARGS=--once",
    f"make test {AGAIN} ARGS=--hypothesis-profile=ci",
    f"LC_ALL={LOCALE} make test {AGAIN} ARGS='tests/cli --hypothesis-profile=ci'",
)

_INSIDE = """
set -e
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$1/dev/pts"
mount -t tmpfs tmpfs "$1/dev/shm"
mount -t sysfs -o ro sysfs "$1/sys"
exec chroot --userspec="$2" "$1" env -i HOME="/home/$2" PATH=/usr/local/bin:/usr/bin:/bin \
    sh -c "cd ~/npu-agent && $3"
"""
"""In namespaces of its own: the root, the user, the command."""


def main(suite: str = "trixie") -> int:
    """Returns 1 if one of the commands failed."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("root makes a clean Debian by debootstrap: sudo make packages newcomer")
        return 1
    with tempfile.TemporaryDirectory(prefix="npu-newcomer-") as directory:
        root = Path(directory, "root")
        clean = cached(f"newcomer-{suite}", [PACKAGES, LOCALE], lambda into: make(suite, into))
        _run("cp", "--archive", clean, root)
        furnish(root)
        failed = [command for command in COMMANDS if not succeeds(root, command)]
    print(*(f"failed on Debian {suite}: {command}" for command in failed), sep="\n")
    return 1 if failed else 0


def make(suite: str, root: Path) -> None:
    """A root of Debian with the packages, the locale and the user."""
    mirror = os.environ.get("NPU_AGENT_DEBIAN_MIRROR")
    include = f"--include={','.join(PACKAGES)}"
    _run("debootstrap", "--variant=minbase", include, suite, root, *([mirror] if mirror else []))
    language, _, encoding = LOCALE.partition(".")
    _run("chroot", root, "localedef", "-i", language, "-f", encoding, LOCALE)
    _run("chroot", root, "useradd", "--create-home", USER)


def furnish(root: Path) -> None:
    """Adds the way to the network, which may be another tomorrow, and the clone."""
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        shutil.copy(file, root / file[1:])
    certificates = root / str(images.CERTIFICATES)[1:]
    shutil.rmtree(certificates)
    shutil.copytree(images.CERTIFICATES, certificates, ignore_dangling_symlinks=True)
    (root / "etc/pip.conf").write_text(images._pip_settings(), encoding="utf-8")
    clone = root / str(HOME)[1:] / "npu-agent"
    _run("git", "clone", "--quiet", images.PROJECT, clone)
    _run("chroot", root, "chown", "--recursive", f"{USER}:", HOME)


def succeeds(root: Path, command: str) -> bool:
    """Runs a command there; prints how long it takes."""
    print(f"--- {command}", flush=True)
    began = time.monotonic()
    unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc")
    done = subprocess.run([*unshare, "sh", "-c", _INSIDE, "sh", root, USER, command])
    print(f"--- after {time.monotonic() - began:.0f} s: exit code {done.returncode}", flush=True)
    return done.returncode == 0


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
