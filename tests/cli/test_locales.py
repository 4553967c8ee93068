"""Hosts and images whose locale is not UTF-8: ASCII, and EUC-KR as on many hosts in Korea."""

import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.inventory.helpers import tree
from tests.outputs.deviceplugin.helpers import short_directory
from tests.processes import DEADLINE, environment, started


@dataclass(frozen=True)
class Locale:
    encoding: str
    environment: dict[str, str]


@pytest.fixture(params=[("C", "ascii"), ("ko_KR.EUC-KR", "euc-kr")], ids=lambda names: names[0])
def locale(request: pytest.FixtureRequest, tmp_path: Path) -> Locale:
    name, encoding = request.param
    if name != "C":
        command = ["localedef", "-i", name.partition(".")[0], "-f", encoding.upper()]
        made = subprocess.run([*command, tmp_path / name], capture_output=True)
        if made.returncode and not os.environ.get("CI"):
            pytest.skip("localedef has no source of this locale: make packages")
    # Python by itself takes C for UTF-8.
    ascii_stays = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return Locale(encoding, {"LC_ALL": name, "LOCPATH": str(tmp_path), **ascii_stays})


@pytest.mark.parametrize("command", ["info", "verify", "doctor", "labels show"])
def test_a_command_prints_characters_that_the_locale_has(
    tmp_path: Path, locale: Locale, command: str
) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    done = subprocess.run(
        [sys.executable, "-m", "npu_agent", "--host-root", root, *command.split()],
        capture_output=True,
        timeout=DEADLINE,
        env=environment(locale.environment),
    )
    assert b"Traceback" not in done.stderr
    words = done.stdout.decode(locale.encoding)
    if command == "info":
        assert ("°C" if locale.encoding == "euc-kr" else "?C") in words


def test_the_status_page_is_korean(tmp_path: Path, locale: Locale) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    with short_directory() as plugins:
        options = (f"--host-root={root}", f"--plugin-dir={plugins}", "--labels-output=none")
        listen = "--metrics-listen=127.0.0.1:0"
        by = ("env", *(f"{name}={value}" for name, value in locale.environment.items()))
        with started("run", *options, listen, by=by) as agent:
            _, _, address = agent.said("serving metrics and status").rpartition("address=")
            asked = urllib.request.Request(
                f"http://{address.strip()}/", headers={"Accept-Language": "ko"}
            )
            with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
                assert "카드" in answer.read().decode()
