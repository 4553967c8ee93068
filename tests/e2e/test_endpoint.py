"""TLS and authorization: a real Prometheus and real tokens at a real API server."""

from __future__ import annotations

import base64
import json
import re
import ssl
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.manifests import thing
from tests.e2e.node import NAMESPACE, SOON, Node
from tests.e2e.test_metrics import PAGE, Prometheus, discovered, scraping
from tests.k8s.tools import overlay
from tests.outputs.web.certificates import Authority, authority

pytestmark = pytest.mark.one_kubelet

SECRET = "npu-agent-tls"
ASK = """
import json, ssl, sys, urllib.error, urllib.request
url, ca, token = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.check_hostname = False
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
try:
    answer = urllib.request.urlopen(request, context=context, timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode()]))
"""


def lines_of(section: str) -> dict[str, Any]:
    """What a section of the page adds to the scrape job."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = [
        yaml.safe_load(textwrap.dedent(block))
        for block in re.findall(r"```yaml\n(    .*?)```", text, re.DOTALL)
    ]
    assert len(found) == 1, section
    return dict(found[0])


def put(node: Node, cert: tuple[Path, Path], ca: Path) -> None:
    """Makes or replaces the Secret."""
    files = {"tls.crt": cert[0], "tls.key": cert[1], "ca.crt": ca}
    data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
    kind = "kubernetes.io/tls"
    node.apply(thing("Secret", SECRET, namespace=NAMESPACE, type=kind, data=data))


def token(node: Node, account: str) -> str:
    """A token of a new ServiceAccount, or of one that is there."""
    node.apply(thing("ServiceAccount", account))
    return node.cluster.token_for(account)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def prometheus(
    node: Node, ours: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Scrapes an agent by https, with the token of an account that may."""
    directory = tmp_path_factory.mktemp("prometheus")
    put(node, ours.sign("first"), ours.ca)
    overlay(directory, ["metrics-tls", "metrics-authorization"])
    settings = re.search(
        r"# config.yaml\n(metrics:\n  authorization: kubernetes\n.*?)```", PAGE, re.DOTALL
    )
    assert settings
    config = yaml.safe_load(settings[1])
    config["metrics"]["interval"] = 1
    node.deploy(config, str(directory))

    scraper = token(node, "scraper")
    (directory / "token").write_text(scraper, encoding="utf-8")
    bind = next(
        thing
        for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        if "kind: ClusterRoleBinding" in block
        for thing in yaml.safe_load_all(block)
    )
    bind["subjects"] = [{"kind": "ServiceAccount", "name": "scraper", "namespace": "default"}]
    node.apply(bind)

    job = lines_of("TLS") | lines_of("Authorization")
    job["tls_config"]["ca_file"] = str(ours.ca)
    job["authorization"]["credentials_file"] = str(directory / "token")
    with scraping(node, directory, job) as made:
        yield made
    node.deploy()
    left = ("clusterrolebinding/npu-agent-metrics", "clusterrolebinding/npu-agent-auth-delegator")
    node.kubectl("delete", *left, "clusterrole/npu-agent-metrics")
    node.kubectl("--namespace", NAMESPACE, "delete", "secret", SECRET)


def address(node: Node) -> str:
    (found,) = discovered(node)
    return str(found["targets"][0])


def test_a_client_with_the_right_is_answered_and_another_gets_the_reason(
    node: Node, ours: Authority, prometheus: Prometheus
) -> None:
    assert len(prometheus.wait("furiosa_npu_alive == 1", 2)) == 2

    def ask(path: str, whose: str) -> tuple[int, str]:
        url = f"https://{address(node)}{path}"
        done = node.cluster.enter(sys.executable, "-c", ASK, url, str(ours.ca), whose)
        status, body = json.loads(done.stdout)
        return int(status), str(body)

    scraper, stranger = token(node, "scraper"), token(node, "stranger")
    status, body = ask("/metrics", scraper)
    assert (status, "furiosa_npu_alive" in body) == (200, True)
    status, body = ask("/metrics", stranger)
    assert status == 403
    assert "system:serviceaccount:default:stranger may not get /metrics" in body
    status, body = ask("/status.json", scraper)
    assert (status, "scraper may not get /status.json" in body) == (403, True)
    assert ask("/metrics", "")[0] == 401
    assert ask("/metrics", scraper[:-5] + "AAAAA")[0] == 401
    prometheus.wait('npu_agent_authorizations_total{result="forbidden"} >= 2', 1)
    prometheus.wait('npu_agent_authorizations_total{result="unavailable"} == 0', 1)


def test_certificates_are_followed(node: Node, ours: Authority, prometheus: Prometheus) -> None:
    before = node.agent_run()
    new = ours.sign("second", days=20)
    put(node, new, ours.ca)
    prometheus.wait(
        "npu_agent_tls_certificate_expires_timestamp_seconds - time() > 10 * 86400", 1, 2 * SOON
    )
    host, port = address(node).split(":")
    script = "import ssl,sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"
    shown = node.cluster.enter(sys.executable, "-c", script, host, port).stdout
    wanted = new[0].read_text(encoding="utf-8")
    assert ssl.PEM_cert_to_DER_cert(shown.strip()) == ssl.PEM_cert_to_DER_cert(wanted)
    # The kubelet's probes were answered all the time.
    assert node.agent_run() == before
    assert node.agent_ready()
