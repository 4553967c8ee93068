"""A host with simulated cards, and what an agent has to do on it however it was packaged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from aiohttp import web

from bench.process import POLL, free_port
from npu_agent.people.simulator.kubelet import StandInKubelet
from tests.kube.helpers import NODE, Authority, kubeconfig, serving
from tests.packaging.container import Container
from tests.processes import DEADLINE
from tests.until import until

NPU = "beta.furiosa.ai/npu"


@dataclass(frozen=True)
class Host:
    """Directories below `base`.

    Attributes:
        base: a short path: a unix socket's path has 107 bytes at most.
    """

    base: Path

    @property
    def root(self) -> Path:
        """The simulated driver tree."""
        return self.base / "host"

    @property
    def plugins(self) -> Path:
        return self.base / "device-plugins"

    @property
    def pod_resources(self) -> Path:
        return self.base / "pod-resources"

    @property
    def settings(self) -> Path:
        """What is in /etc/npu-agent."""
        return self.base / "etc"

    def mounted(self, container: Container) -> Container:
        """The same with this host's directories where k8s/daemonset.yaml has them."""
        return replace(
            container,
            writable={"/var/lib/kubelet/device-plugins": self.plugins},
            readable={
                "/etc/npu-agent": self.settings,
                "/host": self.root,
                "/var/lib/kubelet/pod-resources": self.pod_resources,
            },
            environment={
                **container.environment,
                "KUBECONFIG": "/etc/npu-agent/kubeconfig",
                "NODE_NAME": "n1",
            },
        )


async def serves(container: Container, command: Sequence[str], host: Host, ca: Authority) -> None:
    """Runs the agent: it registers, gives a card, labels its Node, answers, ends when told to."""
    kubelet = StandInKubelet(host.plugins, host.pod_resources)
    await kubelet.start()
    async with serving(_node, tls=ca.context()) as api:
        _credentials(host, api.url, ca)
        address = f"127.0.0.1:{free_port()}"
        run = (*command, "run", "--host-root=/host", f"--metrics-listen={address}")
        with host.mounted(container).started(*run) as agent:
            try:
                await kubelet.until(NPU, lambda plugin: len(plugin.healthy()) == 2, DEADLINE)
                grant = await kubelet.allocate(NPU, 1)
                assert grant.environment["NPU_DEVNAME"] == "npu0pe0-1"
                await until(lambda: _page(f"http://{address}/readyz"), interval=POLL)
                page = await _page(f"http://{address}/metrics")
                assert "furiosa_npu_alive{" in page
                assert "process_resident_memory_bytes" in page
                assert "<!DOCTYPE html>" in await _page(f"http://{address}/")
                label = b"beta.furiosa.ai/npu.count"
                await until(lambda: any(label in asked.body for asked in api.asked), interval=POLL)
            finally:
                code, _, errors = await asyncio.to_thread(agent.end)
                print(errors)
        assert code == 0
        assert not [path for path in host.plugins.iterdir() if path.name.startswith("furiosa-npu")]
    await kubelet.stop()


async def _node(request: web.Request) -> web.StreamResponse:
    """The Node, with the labels that the request applies to it."""
    body = await request.text()
    applied = json.loads(body)["metadata"]["labels"] if request.method == "PATCH" else {}
    return web.json_response({**NODE, "metadata": {**NODE["metadata"], "labels": applied}})


def _credentials(host: Host, url: str, ca: Authority) -> None:
    (host.settings / "ca.crt").write_bytes(ca.ca.read_bytes())
    kubeconfig(host.settings, url, cluster={"certificate-authority": "/etc/npu-agent/ca.crt"})


async def _page(url: str) -> str:
    """What is answered; empty while that is no good answer."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return await answer.text() if answer.status == 200 else ""
    return ""
