"""`kubectl furiosa-npu` by the real krew, offline: installed, run, and completed by kubectl."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from npu_agent import __version__
from tests.cluster.build import KREW, KUBERNETES, ensure_binaries

COMPLETION = "kubectl_complete-furiosa_npu"


@pytest.fixture(scope="module")
def path(krew: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """$PATH of a person who has installed the plugin, and linked its completion."""
    home = tmp_path_factory.mktemp("home")
    (archive,) = krew.glob("*.tar.gz")
    given = (f"--manifest={krew / 'furiosa-npu.yaml'}", f"--archive={archive}")
    programs = ensure_binaries(KREW) | ensure_binaries(KUBERNETES)
    done = subprocess.run(
        [programs["krew"], "install", *given],
        env={"HOME": str(home), "KREW_ROOT": str(home / "krew"), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Installed plugin: furiosa-npu" in done.stderr
    (home / COMPLETION).symlink_to((home / "krew/bin/kubectl-furiosa_npu").resolve())
    directories = (home / "krew/bin", home, programs["kubectl"].parent)
    return ":".join([*map(str, directories), os.environ["PATH"]])


def kubectl(path: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": "/nonexistent"}
    return subprocess.run(["kubectl", *words], env=environment, capture_output=True, text=True)


def test_kubectl_runs_it(path: str) -> None:
    assert kubectl(path, "furiosa-npu", "--version").stdout == f"npu-agent {__version__}\n"
    done = kubectl(path, "furiosa-npu", "nodes")
    assert done.returncode == 1
    # As kubectl without a kubeconfig.
    assert "kubectl npu: error: " in done.stderr
    assert "127.0.0.1:8080" in done.stderr


def test_kubectl_completes_it(path: str) -> None:
    found = kubectl(path, "__complete", "furiosa-npu", "unc").stdout
    assert found.splitlines() == ["uncordon\tBring it back", ":4"]


def test_the_plugin_has_cel(krew: Path) -> None:
    """Without it `why` could not judge a claim."""
    (archive,) = krew.glob("*.tar.gz")
    sbom = ["tar", "-xzOf", str(archive), "npu-agent.spdx.json"]
    assert b"cel-expr-python" in subprocess.run(sbom, capture_output=True, check=True).stdout
