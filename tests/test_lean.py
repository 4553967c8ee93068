"""What the agent does not need is not loaded, and is there all the same for who asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_agent.outputs.prometheus import page
from tests.kube.helpers import authority
from tests.processes import DEADLINE

EVERYTHING = """
import npu_agent.cli, npu_agent.agent, npu_agent.outputs.web.connections
from npu_agent.kube import lean as kube
kube.module("kubernetes_asyncio.client.api_client")
"""
HEAVY = (
    "aiohttp.web",
    "aiohttp.web_fileresponse",
    "http.server",
    "kubernetes_asyncio.client.api",
    "multiprocessing",
    "npu_agent.simulator",
    "prometheus_client.exposition",
    "rich",
    "urllib3.util",
    "wsgiref",
)
"""Each is, with what it brings along, at least half a megabyte."""


def python(code: str, **environment: str | Path) -> list[str]:
    """Runs it in a process of its own; the words it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys\nfrom npu_agent import lean\n{code}"],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library that says what of it is imported."""
    (tmp_path / "big" / "part").mkdir(parents=True)
    (tmp_path / "big" / "__init__.py").write_text(
        "print('everything')\nfrom . import part\nfrom .small import value\nother = value + 1\n"
    )
    (tmp_path / "big" / "part" / "__init__.py").write_text("print('part')\n")
    (tmp_path / "big" / "small.py").write_text("print('small')\nvalue = 1\n")
    return tmp_path


def test_the_agent_loads_nothing_heavy_that_it_has_no_use_for() -> None:
    assert python(f"{EVERYTHING}\nprint(*(n for n in {HEAVY} if n in sys.modules))") == []


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("from big.small import value", "small"),
        ("from big.small import value\nimport big\nprint(big.other)", "small everything part 2"),
        ("from big import other\nprint(other)", "everything part small 2"),
        ("import big.small\nprint(big.small.value, big.other)", "small everything part 1 2"),
        ("import big\nimport big\nprint('imported')", "imported"),
        ("import big\nprint(hasattr(big, 'nothing'))", "everything part small False"),
    ],
)
def test_a_package_is_imported_whole_when_somebody_asks_it_for_more(
    library: Path, code: str, printed: str
) -> None:
    assert (
        python(f"lean.package('big')\nlean.package('big')\n{code}", PYTHONPATH=library)
        == printed.split()
    )


def test_a_package_that_is_there_already_stays_as_it_is(library: Path) -> None:
    code = "import big\nassert lean.package('big') is big\nprint(big.other)"
    assert python(code, PYTHONPATH=library) == ["everything", "part", "small", "2"]


def test_a_package_that_is_missing_is_an_import_error() -> None:
    code = "try:\n lean.package('nowhere')\nexcept ImportError as error:\n print(error)"
    assert python(code) == ["nowhere", "is", "not", "installed"]


def test_prometheus_client_is_whole_for_who_wants_it() -> None:
    code = """
from npu_agent.outputs.prometheus.text import Metric
import prometheus_client
assert prometheus_client.Metric is Metric
print(prometheus_client.Counter("c", "h", registry=None).describe()[0].name)
"""
    assert python(code) == ["c"]


def test_content_types_are_those_of_prometheus_client() -> None:
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

    assert (page.TEXT, page.OPENMETRICS) == (CONTENT_TYPE_PLAIN_0_0_4, CONTENT_TYPE_LATEST)


def test_only_aiohttps_own_contexts_go_without_authorities(tmp_path: Path) -> None:
    code = """
import ssl
lean.aiohttp()
from aiohttp import connector
own = connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED
print(*(len(each.get_ca_certs()) for each in (*own, ssl.create_default_context())))
print(own[0].verify_mode.name)
"""
    ca = authority(tmp_path / "tls").ca
    assert python(code, SSL_CERT_FILE=ca, SSL_CERT_DIR=tmp_path) == ["0", "0", "1", "CERT_REQUIRED"]


def test_the_client_has_what_was_put_off_when_it_needs_it() -> None:
    code = """
from npu_agent.kube import lean as kube
client = kube.module("kubernetes_asyncio.client.api_client")
made = kube.module("kubernetes_asyncio.client.configuration").Configuration()
made.username, made.password = "u", "p"
print(made.get_basic_auth_token())
with client.ThreadPool(1) as pool:
    print(*pool.map(str.upper, "ab"))
import multiprocessing.pool
assert isinstance(pool, multiprocessing.pool.ThreadPool)
"""
    assert python(code) == ["Basic", "dTpw", "A", "B"]
