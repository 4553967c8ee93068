"""The inhibitions of docs/monitoring.md, by a real Alertmanager."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.monitoring.helpers import PAGE, rules

SERVER = "prometheus-alertmanager"
ALERTS = rules("alert")
[TEXT] = re.findall(r"```yaml\n(inhibit_rules:.+?)```", PAGE, re.DOTALL)
PAIRS = [
    (source, target)
    for rule in yaml.safe_load(TEXT)["inhibit_rules"]
    for source in re.findall(r"Npu\w+", " ".join(rule["source_matchers"]))
    for target in re.findall(r"Npu\w+", " ".join(rule["target_matchers"]))
]

pytestmark = pytest.mark.skipif(
    shutil.which(SERVER) is None and not os.environ.get("CI"),
    reason=f"{SERVER} is not installed: apt-get install {SERVER}",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An Alertmanager with the rules of the page and a receiver that sends nothing."""
    directory = tmp_path_factory.mktemp("alertmanager")
    config = directory / "config.yaml"
    config.write_text(f"route: {{receiver: none}}\nreceivers: [{{name: none}}]\n{TEXT}")
    arguments = [f"--config.file={config}", f"--storage.path={directory}/data"]
    arguments += ["--web.listen-address=127.0.0.1:0", "--cluster.listen-address="]
    with subprocess.Popen([SERVER, *arguments], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"Listening on.* address=(127.0.0.1:\d+)", line):
                break
        else:
            raise AssertionError(f"it ended: {''.join(lines)}")
        yield f"http://{found[1]}"
        server.terminate()


def amtool(url: str, *arguments: str) -> str:
    command = ["amtool", f"--alertmanager.url={url}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fires(url: str, alert: str, device: str) -> None:
    """An alert of a card, with the labels that Prometheus gives it."""
    labels = {"hostname": "node-1", "arch": "rngd", "device": device} | ALERTS[alert]["labels"]
    amtool(url, "alert", "add", alert, *(f"{name}={value}" for name, value in labels.items()))


def active(url: str, device: str) -> set[str]:
    """The alerts of a card that people are notified of."""
    found = amtool(url, "alert", "query", "--active", "-o", "simple", f"device={device}")
    return set(re.findall(r"Npu\w+", found))


@pytest.mark.parametrize(("worse", "milder"), PAIRS)
def test_the_worse_alert_silences_the_milder_one_of_the_same_card(
    url: str, worse: str, milder: str
) -> None:
    # The labels that both have to have, or the rule inhibits nothing.
    for alert in (worse, milder):
        assert "(cluster, hostname, arch, device" in ALERTS[alert]["expr"]
    device, other = f"npu{PAIRS.index((worse, milder))}", "npu99"
    fires(url, milder, device)
    fires(url, milder, other)
    assert active(url, device) == {milder}
    fires(url, worse, device)
    assert active(url, device) == {worse}
    assert milder in active(url, other)
