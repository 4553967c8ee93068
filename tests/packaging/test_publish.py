"""What a release publishes, made by the make targets of the release workflow, and installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from npu_agent import __version__
from tests.cluster.build import ACTIONLINT, HELM, REGISTRY, ensure_binaries
from tests.packaging.conftest import PROJECT

SOURCE = "https://example.com/npu-agent"


def run(*command: str | Path, **environment: str) -> str:
    """What it prints; it has to succeed."""
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def helm() -> Path:
    return ensure_binaries(HELM)["helm"]


@pytest.fixture(scope="module")
def chart(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart's archive, by `make chart`."""
    dist = tmp_path_factory.mktemp("chart")
    words = ("--no-print-directory", f"HELM={helm}", f"SOURCE={SOURCE}", f"DIST={dist}")
    assert run("make", "chart", *words) == f"{dist}/npu-agent-{__version__}.tgz\n"
    return dist / f"npu-agent-{__version__}.tgz"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of an OCI registry on this machine."""
    directory = tmp_path_factory.mktemp("registry")
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
        "http": {"addr": "127.0.0.1:0"},
        "log": {"accesslog": {"disabled": True}},
    }
    (directory / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(ensure_binaries(REGISTRY)["registry"]), "serve", str(directory / "config.yml")]
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as serving:
        assert serving.stderr is not None
        try:
            lines = iter(serving.stderr)
            heard = re.compile(r"listening on (127\.0\.0\.1:\d+)")
            yield next(found[1] for line in lines if (found := heard.search(line)))
        finally:
            serving.terminate()


def test_the_chart_is_installed_from_a_registry(helm: Path, chart: Path, registry: str) -> None:
    address = f"oci://{registry}/charts"
    pushed = run(helm, "push", chart, address, "--plain-http")
    assert re.search(r"^Digest: sha256:[0-9a-f]{64}$", pushed, re.MULTILINE)
    words = ("--plain-http", "--version", __version__)
    described = yaml.safe_load(run(helm, "show", "chart", f"{address}/npu-agent", *words)[:-1])
    assert (described["home"], described["sources"]) == (SOURCE, [SOURCE])
    install = (helm, "install", "npu-agent", "--dry-run=client", "--namespace", "kube-system")
    got = run(*install, f"{address}/npu-agent", *words, KUBECONFIG=os.devnull)
    ours = run(*install, "k8s/chart", KUBECONFIG=os.devnull)
    assert got.partition("HOOKS:")[2] == ours.partition("HOOKS:")[2]
    assert "kind: DaemonSet" in got


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, by `make wheel`."""
    dist = tmp_path_factory.mktemp("wheel")
    run("make", "wheel", f"VENV={Path(sys.executable).parents[1]}", f"DIST={dist}")
    made = {file.name for file in dist.iterdir() if file.name != ".gitignore"}
    name = f"npu_agent-{__version__}"
    assert made == {f"{name}-py3-none-any.whl", f"{name}.tar.gz", "npu-agent-wheel.spdx.json"}
    return dist / f"{name}-py3-none-any.whl"


def test_the_wheel_is_the_same_each_time(wheel: Path, tmp_path: Path) -> None:
    run("make", "wheel", f"VENV={Path(sys.executable).parents[1]}", f"DIST={tmp_path}")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheels_sbom_has_what_it_needs(wheel: Path) -> None:
    parts = json.loads(wheel.with_name("npu-agent-wheel.spdx.json").read_text(encoding="utf-8"))[
        "packages"
    ]
    names = {part["name"] for part in parts}
    assert {"npu-agent", "aiohttp", "grpclib", "msgspec"} <= names
    assert not {"mypy", "pytest", "uv"} & names


def test_pipx_installs_a_command_that_runs(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "pipx", with_pip=True)
    run(tmp_path / "pipx/bin/python", "-m", "pip", "install", "--quiet", "pipx")
    homes = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    run(tmp_path / "pipx/bin/pipx", "install", "--python", sys.executable, str(wheel), **homes)
    said = re.compile(rf"npu-agent {__version__} \(commit [0-9a-f]{{40}}(-dirty)?\)\n")
    assert said.fullmatch(run(tmp_path / "bin/npu-agent", "version"))
    assert "npu0" in run(tmp_path / "bin/npu-agent", "demo", "--once")


def test_uv_installs_a_command_that_runs(wheel: Path, tmp_path: Path) -> None:
    homes = {"UV_TOOL_DIR": str(tmp_path / "home"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    uv = Path(sys.executable).with_name("uv")
    run(uv, "tool", "install", "--python", sys.executable, wheel, **homes)
    assert run(tmp_path / "bin/npu-agent", "-V") == f"npu-agent {__version__}\n"


def test_the_workflows_are_sound() -> None:
    files = sorted((PROJECT / ".github/workflows").glob("*.yml"))
    run(ensure_binaries(ACTIONLINT)["actionlint"], "-shellcheck=", "-pyflakes=", *files)
