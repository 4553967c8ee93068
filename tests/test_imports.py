"""Libraries are imported whole, and late: when, and on which thread."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.helpers import DEADLINE, NODE, Authority, authority, says, serving

HEAVY = ("kubernetes_asyncio", "aiohttp", "jinja2", "npu_agent.people.simulator", "rich")
"""Each is, with what it brings along, at least half a megabyte."""
LOADED = f"print(*(name for name in {HEAVY} if name in sys.modules))"
CALLS = """
import asyncio, pathlib, threading
from npu_agent.kube import Api, credentials, node
credentials.DIRECTORY = pathlib.Path(sys.argv[1])
class Finder:
    def find_spec(self, name, *_):
        # What takes long to import must not hold up the loop.
        if name in ("aiohttp", "kubernetes_asyncio"):
            assert threading.current_thread().daemon, name
sys.meta_path.insert(0, Finder())
async def main():
    api = Api(deadline=60)
    await node.apply_labels(api, await node.read(api, "n1"), {"a": "b"})
    await api.close()
asyncio.run(main())
"""


async def python(code: str, *arguments: object, **environment: object) -> list[str]:
    """Runs it in a process of its own; the words it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import sys\n{code}",
        *map(str, arguments),
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(3 * DEADLINE):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().split()


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"))


async def test_the_agent_loads_what_is_heavy_on_a_thread_and_not_before_it_is_used(
    tmp_path: Path, signed: Authority
) -> None:
    (tmp_path / "token").write_text("secret", encoding="utf-8")
    (tmp_path / "ca.crt").write_bytes(signed.ca.read_bytes())
    code = (
        f"import npu_agent.cli.main, npu_agent.agent.run\n{LOADED}\nprint('|')\n{CALLS}\n{LOADED}"
    )
    async with serving(says(NODE), tls=signed.context()) as server:
        _, _, port = server.url.rpartition(":")
        pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        assert await python(code, tmp_path, **pod) == ["|", "kubernetes_asyncio", "aiohttp"]
        assert len(server.asked) == 2


async def test_the_command_line_of_the_agent_loads_no_help_and_no_other_command() -> None:
    code = (
        "from npu_agent.cli.catalogue import parse\n"
        "parse(['run', '--interval=5', '--host-root', '/'])\n"
        "heavy = ('difflib', 'npu_agent.people.simulator', 'rich', 'yaml')\n"
        "print(*(name for name in heavy if name in sys.modules))\n"
        "print(*(name for name in sys.modules if name.startswith('npu_agent.cli.')))"
    )
    assert await python(code) == ["npu_agent.cli.parser", "npu_agent.cli.catalogue"]


async def test_without_credentials_it_is_not_loaded(tmp_path: Path) -> None:
    code = CALLS.replace("    await node.apply", "    try: await node.apply").replace(
        "    await api.close()", "    except Exception as error: print(error.kind.value)"
    )
    printed = await python(f"{code}\n{LOADED}", tmp_path, KUBECONFIG=tmp_path / "missing")
    assert printed == ["credentials"]
