"""Which test types the commands of the pages that lead through an installation.

Each command of these pages is typed by a test as it stands there, or is left out below with the
reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from .pages import Page, page

_NAMES = ("install", "platforms", "scheduling", "dra", "migration")
PAGES = (page("README.md"), *(page(f"docs/{name}.md") for name in _NAMES))

_PAGES = "tests/e2e/journey/test_pages.py::"
_VENDORS = "tests/e2e/journey/test_vendors.py::"
_SIMULATED = "tests/e2e/journey/test_cards.py::"
TYPED = {
    ("README.md", "Install"): _PAGES + "test_the_readme",
    ("docs/install.md", "Three ways to install"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/platforms.md", "Count the NPUs"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/platforms.md", "kind"): _SIMULATED + "test_the_quick_start",
    ("docs/scheduling.md", "Which nodes"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/scheduling.md", "With Node Feature Discovery"): "tests/e2e/journey/test_nfd.py::"
    "test_a_node_that_was_tainted_from_birth_gets_its_label_and_the_agent",
    ("docs/scheduling.md", "Bin packing"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/scheduling.md", "Nodes for NPU Pods only"): _PAGES
    + "test_from_the_image_and_away_again",
    ("docs/install.md", "Verify"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/install.md", "Uninstall"): _PAGES + "test_from_the_image_and_away_again",
    ("docs/install.md", "A registry that needs a password"): _PAGES + "test_a_password_with_helm",
    ("docs/install.md", "The Secret with Helm"): _PAGES + "test_a_password_with_helm",
    ("docs/install.md", "The Secret with kustomize"): _PAGES + "test_a_password_with_kustomize",
    ("docs/install.md", "The Secret with one file"): _PAGES + "test_a_password_with_one_file",
    ("docs/dra.md", "Enable DRA"): _PAGES + "test_claims_and_away_again",
    ("docs/dra.md", "Remove DRA"): _PAGES + "test_claims_and_away_again",
    ("docs/migration.md", "From the charts"): _VENDORS + "test_from_the_charts_and_back",
    ("docs/migration.md", "Back to the charts"): _VENDORS + "test_from_the_charts_and_back",
    ("docs/migration.md", "From the manifests"): _VENDORS + "test_from_the_manifests_and_back",
    ("docs/migration.md", "Back to the manifests"): _VENDORS + "test_from_the_manifests_and_back",
    ("docs/dra.md", "Move a node to DRA and back"): _PAGES + "test_moving_a_node",
}
"""The test that types the commands below a heading of a page."""
ELSEWHERE = "docs/limitations.md: no such cluster can be started here"
LEFT_OUT = {
    ("README.md", "Try it"): "tests/people/commands/test_demo.py runs the tour, CI the tests",
    ("docs/scheduling.md", "By Open Policy Agent"): "the chart is on a public site; "
    "tests/e2e/journey/test_scheduling.py runs OPA with these values and this policy",
    ("docs/platforms.md", "k3s"): ELSEWHERE,
    ("docs/platforms.md", "OpenShift"): ELSEWHERE,
}
"""Why no test types the commands below a heading."""
LINES_LEFT_OUT = {
    "make image IMAGE=registry.example.com/npu-agent:0.1.0": "it takes a Python image of a public "
    "registry; tests/packaging makes the image on one of its own",
    "podman push registry.example.com/npu-agent:0.1.0": "the cluster's registry has the image; "
    "containerd's client has pushed it",
    "make image TOOL=docker": "as above",
    "helm install nfd oci://registry.k8s.io/nfd/charts/node-feature-discovery --version 0.18.3 \\\n"
    "  --namespace node-feature-discovery --create-namespace "
    "--values k8s/examples/nfd-values.yaml": "the test takes the same chart from its Go module",
    "kind create cluster": "it takes Docker, and an image of a public registry; the test's cluster "
    "is one node, too",
    "kind load docker-image npu-agent:0.1.0": "containerd's client has loaded it, by the same name",
}
"""Why a test leaves out a single command of those that it types."""


RUNBOOK = (page("docs/alerts.md"), page("docs/troubleshooting.md"))
"""The pages for a person on call, whose commands are in their sentences too."""
DESK = ("kubectl", "npu-agent", "helm", "curl")
ON_THE_NODE = (
    *("cat", "crictl", "df", "dmesg", "echo", "fuser", "ls", "lspci", "modprobe", "mount"),
    "systemctl",
)
_NO_DRIVER = "the nodes of tests have no driver, and the bus of this machine"
RUNBOOK_LEFT_OUT = {
    "systemctl status kubelet": "the nodes of tests have no systemd",
    "crictl ps": "the nodes of tests have containerd's own client",
    "crictl stop": "as above",
    "cat /sys/kernel/debug/rngd/mgmt*/power_sense": _NO_DRIVER,
    "modprobe -r furiosa_rngd && modprobe furiosa_rngd": _NO_DRIVER,
    "echo 1 >/sys/bus/pci/devices/ADDRESS/remove; echo 1 >/sys/bus/pci/rescan": _NO_DRIVER,
    "kubectl -n kube-system describe certificate": "it needs cert-manager",
}
"""Why tests/e2e/test_runbook.py leaves out a command."""


def runbook_commands(of: Page) -> Iterator[tuple[str, str]]:
    """The commands of a page of the runbook, each with the paragraph or block it stands in."""
    for language, code in of.blocks:
        for command in commands(language, code):
            yield command, code
    for paragraph in re.split(r"\n(?=\n|\||  *- |- )", of.prose):
        for text in re.findall(r"`([^`]+)`", paragraph):
            command = " ".join(text.replace("\\|", "|").split())
            if command.split()[0] in (*DESK, *ON_THE_NODE):
                yield command, paragraph


def commands(language: str, code: str) -> Iterator[str]:
    """The commands of a block, each whole, without comments."""
    if language not in ("sh", "console"):
        return
    text = ""
    for line in code.splitlines():
        if language == "console" and not line.startswith("$ "):
            continue
        text += re.sub(r"(^|\s+)# .*", "", line.removeprefix("$ "))
        if text.endswith("\\") or not _is_complete(text):
            text += "\n"
        elif text.strip():
            yield text.strip()
            text = ""
        else:
            text = ""


def _is_complete(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def blocks(of: Page) -> Iterator[tuple[str, str, str]]:
    """Heading, language and content of each block of commands."""
    for heading in dict.fromkeys(heading for _, heading in of.headings):
        for language, code in of.below(heading):
            if any(commands(language, code)):
                yield heading, language, code


def typed_by(test: str) -> list[str]:
    """The commands that a test types."""
    return [
        command
        for of in PAGES
        for heading, language, code in blocks(of)
        if TYPED.get((of.name, heading)) == test
        for command in commands(language, code)
        if command not in LINES_LEFT_OUT
    ]
