"""kubernetes_asyncio is loaded late and in small part; and wholly where its layout has changed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.helpers import DEADLINE, NODE, kubeconfig, says, serving

LIST = "print(*[name for name in sys.modules if name.startswith(('kubernetes_', 'aiohttp'))])"
LOAD = """
lean.module("kubernetes_asyncio.client.api_client")
lean.module("kubernetes_asyncio.config.kube_config")
"""
CALL = """
import asyncio, logging, pathlib
from npu_agent.kube import Api, ApiError
logging.basicConfig(format="%(message)s")
async def main():
    api = Api(kubeconfig=pathlib.Path(sys.argv[1]))
    for _ in range(2):
        print((await api.node("n1")).name)
    await api.close()
asyncio.run(main())
"""


async def python(code: str, *arguments: object) -> tuple[list[str], str]:
    """Runs it in a process of its own; the words it prints, and its stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import sys\nfrom npu_agent.kube import lean\n{code}",
        *map(str, arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(3 * DEADLINE):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().split(), err.decode()


async def test_nothing_is_loaded_before_the_first_call() -> None:
    loaded, _ = await python(f"from npu_agent.kube import Api\napi = Api()\n{LIST}")
    assert loaded == []


async def test_only_what_is_used_is_loaded() -> None:
    loaded, err = await python(f"{LOAD}\n{LIST}")
    of_it = {name for name in loaded if name.startswith("kubernetes_asyncio")}
    assert err == ""
    assert not [n for n in of_it if n.startswith("kubernetes_asyncio.client.models.")]
    assert not [n for n in of_it if n.startswith("kubernetes_asyncio.client.api.")]
    assert "kubernetes_asyncio.config.kube_config" in of_it
    assert len(of_it) < 20


BROKEN = {
    "a name is gone": "lean._REEXPORTED = {'configuration': 'Nothing'}",
    "another package has something in its __init__": (
        "lean._UNEXECUTED += ('kubernetes_asyncio.config.exec_provider',)"
    ),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
async def test_another_layout_has_all_of_it_loaded(change: str, tmp_path: Path) -> None:
    async with serving(says(NODE)) as server:
        path = kubeconfig(tmp_path, server.url)
        printed, err = await python(f"{change}\n{CALL}\n{LIST}", path)
    assert printed[:2] == ["n1", "n1"]
    assert "kubernetes_asyncio.client.models.v1_node" in printed
    (line,) = err.splitlines()
    assert "kubernetes_asyncio is not laid out as this agent knows it" in line


async def test_a_library_that_was_loaded_as_usual_is_used_as_it_is() -> None:
    loaded, err = await python(f"import kubernetes_asyncio\n{LOAD}\n{LIST}")
    assert "kubernetes_asyncio.client.models.v1_node" in loaded
    assert err == ""


async def test_memory_stays_small(tmp_path: Path) -> None:
    # aiohttp is not counted: the pages on :9100 need it anyway.
    rss = "[int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmRSS')][0]"
    async with serving(says(NODE)) as server:
        path = kubeconfig(tmp_path, server.url)
        printed, _ = await python(
            f"import aiohttp, asyncio\nbefore = {rss}\n{CALL}\nprint({rss} - before)", path
        )
    assert int(printed[-1]) < 15 * 1024
