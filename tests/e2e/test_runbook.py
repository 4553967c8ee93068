"""Every command of the runbook's pages, typed as it stands by a person who has kubectl alone."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.typed import ON_THE_NODE, RUNBOOK, RUNBOOK_LEFT_OUT, runbook_commands
from tests.e2e.node import AGENT, NAMESPACE, Node
from tests.terminal import Terminal, terminal

pytestmark = pytest.mark.one_kubelet
ALL = [
    command
    for command in dict.fromkeys(command for of in RUNBOOK for command, _ in runbook_commands(of))
    if command not in RUNBOOK_LEFT_OUT
]
SETTINGS = [command for command in ALL if re.match(r"\w+=", command)]
"""NODE, POD and IMAGE, which other commands use."""
SHELL = next(command for command in ALL if " debug " in command)
REMOVAL = next(command for command in ALL if "managed-by=kubectl-debug" in command)
"""What takes away the Pods that the shell leaves."""
FORWARD = next(command for command in ALL if "port-forward" in command)
AT_LAST = [
    next(command for command in ALL if end in command)
    for end in ("rollout restart", "delete $POD", "kubectl drain")
]
"""Those that end Pods of the agent or of tests."""
THERE = [command for command in ALL if command.split()[0] in ON_THE_NODE]
"""For the shell on the node."""
FINDS_FAULTS = ("npu-agent doctor", "kubectl npu verify", "grep")
"""What may end with 1 where all was said: a fault was found, or no line."""
OWN = {"NODE=node-1": "NODE={node}", "POD": "worker", "NODE": "{node}", "PATH": "/sys/fs/cgroup"}
"""The words that a reader replaces."""


@pytest.fixture(autouse=True)
def kept(node: Node, repaired: None) -> Iterator[None]:  # noqa: ARG001
    """What the commands did to the Node is undone."""
    yield
    node.kubectl("uncordon", node.name)
    node.kubectl("rollout", "status", *AGENT, "--timeout=60s")


def meant(command: str, node: Node) -> str:
    """The command with the reader's own words."""
    for word, own in OWN.items():
        pattern = rf"(?<![$\w/:]){re.escape(word)}(?![\w:.=])" if "=" not in word else word
        command = re.sub(pattern, own.format(node=node.name), command)
    return command


def script(node: Node, command: str, directory: Path) -> str:
    """A shell's script that types the settings, then the command."""
    plugin = Path(sys.executable).parent
    typed = [*SETTINGS, command] if "$" in command else [command]
    lines = (meant(line, node) for line in typed)
    return "\n".join((f"cd {directory}", f"export PATH=$PATH:{plugin}", *lines))


def typed(node: Node, command: str, directory: Path) -> str:
    """Types a command at the desk; returns what it prints."""
    done = node.cluster.enter(
        "bash", "-c", script(node, command, directory), check=False, timeout=120
    )
    allowed = (0, 1) if any(words in command for words in FINDS_FAULTS) else (0,)
    assert done.returncode in allowed, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
    assert not re.search(r"^error:|unknown (command|flag)", done.stderr, re.MULTILINE), command
    return done.stdout


@contextmanager
def shell_on_the_node(node: Node, directory: Path) -> Iterator[Terminal]:
    """The shell on the node that the page's command gets; it is left in the end."""
    words = node.cluster.command("bash", "-c", script(node, SHELL, directory))
    with terminal(*words) as shell:
        shell.until("pressing enter|# $")
        shell.type("\n")
        shell.until("# $")
        yield shell
        shell.type("exit\n")
        shell.ended()


def type_there(shell: Terminal, command: str) -> int:
    """Types a command in a shell on the node; its exit code."""
    start = len(shell.output)
    shell.type(f'{command}; echo "ended=$?"\n')
    return int(shell.until(r"ended=(\d+)", start)[1])


def test_every_command_runs_at_the_desk(node: Node, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("interval: 5\n", encoding="utf-8")
    before = node.agent_run()
    node.kill_agent()  # for the log of the container before
    node.wait_restarted(before)
    node.run("worker", 1)
    special = {SHELL, REMOVAL, FORWARD, *AT_LAST, *THERE, *SETTINGS}
    printed = {command: typed(node, command, tmp_path) for command in ALL if command not in special}
    assert any("config.yaml" in command for command in printed)
    (cordoned,) = (words for command, words in printed.items() if " cordon " in command)
    assert cordoned.strip() == f"npu0 of Node {node.name} is cordoned"

    waits = "& until grep -q Forwarding out; do kill -0 $! && sleep 0.1 || exit 1; done; kill $!"
    typed(node, f"{FORWARD} >out {waits}", tmp_path)
    node.delete_pods()
    for command in AT_LAST:
        typed(node, command, tmp_path)
        node.kubectl("rollout", "status", *AGENT, "--timeout=60s")
        node.wait_equal("one agent", lambda: len(node.all_agents()), 1)
    assert node.get("node", node.name)["spec"]["unschedulable"]


def test_every_command_on_the_node_runs_in_the_shell_that_kubectl_gets_there(
    node: Node, tmp_path: Path
) -> None:
    """With the image that the node has: no registry is asked, and there is no ssh."""
    with shell_on_the_node(node, tmp_path) as shell:
        for command in THERE:
            written = f"{meant(command, node)} >{tmp_path}/typed 2>&1"
            assert type_there(shell, written) != 127, f"no {shlex.split(command)[0]} on the node"
        # It is the node's own root: what containers have as /run/containerd is there.
        there = "dmesg | grep -c . ; test -S /run/containerd/containerd.sock"
        assert type_there(shell, there) == 0
    pods = [pod["metadata"]["name"] for pod in node.objects("pod", NAMESPACE)]
    assert [name for name in pods if name.startswith(f"node-debugger-{node.name}-")]
    typed(node, REMOVAL, tmp_path)
    gone = {pod["metadata"]["name"] for pod in node.objects("pod", NAMESPACE)}
    assert not [name for name in gone if name.startswith("node-debugger-")]
