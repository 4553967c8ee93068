"""The binary, where there is the C library and libz, a shell, and no Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

from npu_agent import __version__
from tests.kube.helpers import Authority, kubeconfig
from tests.packaging import host as on
from tests.packaging.container import Container
from tests.packaging.host import Host

COMMAND = ("/usr/local/bin/npu-agent",)
SHELL = ("/bin/busybox", "sh", "-c")


def container(binary: Path, temporary: str = "size=64m") -> Container:
    return Container(root=binary / "rootfs", temporary=temporary, environment={"PATH": "/bin"})


def test_the_binary_is_one_file_that_says_its_version(binary: Path) -> None:
    assert container(binary).ran(*COMMAND, "--version") == (0, f"npu-agent {__version__}\n", "")
    _, out, _ = container(binary).ran(*COMMAND, "version", "-o", "json")
    assert re.fullmatch("[0-9a-f]{40}", json.loads(out)["commit"])
    assert not [*binary.glob("rootfs/**/*python*")]


def test_simulate_info_and_demo(binary: Path) -> None:
    commands = (
        "npu-agent simulate /tmp/host --once --cards warboy=1,rngd=1 >&2",
        "npu-agent info --host-root /tmp/host",
        "npu-agent info --host-root /tmp/host --format json",
        "npu-agent demo --once >&2",
    )
    where = ("export PATH=/usr/local/bin",)
    code, out, errors = container(binary).ran(*SHELL, " && ".join((*where, *commands)))
    assert code == 0, errors
    table, _, cards = out.partition("[\n")
    assert "FuriosaAI Warboy" in table
    assert [card["family"] for card in json.loads(f"[\n{cards}")] == ["warboy", "rngd"]


async def test_runs_read_only_and_without_capabilities(
    binary: Path, host: Host, ca: Authority
) -> None:
    await on.serves(container(binary), COMMAND, host, ca)


def test_a_login_program_gets_the_hosts_libraries(binary: Path, host: Host) -> None:
    """Else what the bootloader sets for itself would be handed on to it."""
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "/bin/busybox",
            "args": ["sh", "-c", 'echo "libraries: ${LD_LIBRARY_PATH-none}" >&2; exit 1'],
            "interactiveMode": "Never",
        }
    }
    kubeconfig(host.settings, "https://127.0.0.1:1", user=user)
    apply = (*COMMAND, "labels", "apply", "--host-root=/host")
    code, _, errors = host.mounted(container(binary)).ran(*apply)
    assert code == 1
    assert "libraries: none" in errors


def test_sbom(binary: Path) -> None:
    parts = json.loads((binary / "npu-agent.spdx.json").read_text(encoding="utf-8"))["packages"]
    names = {part["name"] for part in parts}
    assert {"npu-agent", "python", "aiohttp", "grpclib"} <= names
    assert not {"pip", "pyinstaller", "setuptools"} & names
