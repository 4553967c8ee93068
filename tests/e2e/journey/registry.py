"""Two registries in the cluster's network: one that is open, and one that asks for a password.

Both serve the same images, and the node's containerd finds one of them by the name that the pages
use, registry.example.com. The node has none of the images: each is pulled.
"""

from __future__ import annotations

import json

from tests.cluster import Cluster, Image
from tests.cluster.build import REGISTRY, ensure_binaries
from tests.cluster.settings import CONTAINERD_SOCKET, NODE_ADDRESS

PRIVATE = "registry.example.com"
"""The registry of the pages."""
PUBLIC = ("docker.io", "registry.k8s.io")
USER, PASSWORD = "npu", "secret"
_HASH = "$2b$05$npuagentnpuagentnpuaguT/KxZDuhVCajD03Y3Gib6LTmG0p2u42"
"""Of the password, by bcrypt."""
_OPEN, _CLOSED = 5000, 5001
CHARTS = f"oci://{NODE_ADDRESS}:{_OPEN}/charts"
"""Where charts are pushed to; by http."""
_CTR = ("ctr", "--address", CONTAINERD_SOCKET, "--namespace")
_HOSTS = "/etc/containerd/certs.d"


class Registry:
    """The registries of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """Starts both; they end with the cluster."""
        self._cluster = cluster
        directory = cluster.workdir / "run" / "registry"
        directory.mkdir()
        (directory / "htpasswd").write_text(f"{USER}:{_HASH}\n", encoding="utf-8")
        auth = {"htpasswd": {"realm": PRIVATE, "path": f"{directory}/htpasswd"}}
        program = str(ensure_binaries(REGISTRY)["registry"])
        for port, who in ((_OPEN, {}), (_CLOSED, {"auth": auth})):
            config = {
                "version": 0.1,
                "log": {"level": "warn", "accesslog": {"disabled": True}},
                "storage": {"filesystem": {"rootdirectory": f"{directory}/images"}},
                "http": {"addr": f"{NODE_ADDRESS}:{port}", "secret": "of both"},
                **who,
            }
            path = directory / f"{port}.yml"
            path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
            cluster.start_program(f"registry-{port}", [program, "serve", str(path)], port)
        for host in PUBLIC:
            self._lead(host, _OPEN)

    def push(self, image: Image, name: str) -> None:
        """Gives the registries an image by a name such as ``npu-agent:0.1.0``."""
        self._cluster.import_image(image.archive, namespace="push")
        target = f"{NODE_ADDRESS}:{_OPEN}/{name}"
        push = (*_CTR, "push", "images", "push", "--plain-http", target, image.name)
        self._cluster.enter(*push, timeout=120)
        self._cluster.enter(*_CTR, "push", "images", "rm", "--sync", image.name)

    def ask_for_a_password(self, asks: bool) -> None:
        """Leads the node to the registry that asks for a password, or to the open one."""
        self._lead(PRIVATE, _CLOSED if asks else _OPEN)

    def forget(self) -> None:
        """Removes what the node has pulled of the private registry."""
        found = self._cluster.enter(*_CTR, "k8s.io", "images", "ls", "--quiet").stdout.split()
        # The kubelet's containerd names an image by its digest, too: what is left is not run.
        if mine := [name for name in found if name.startswith(f"{PRIVATE}/")]:
            self._cluster.enter(*_CTR, "k8s.io", "images", "rm", "--sync", *mine)

    def _lead(self, host: str, port: int) -> None:
        text = f'server = "http://{NODE_ADDRESS}:{port}"\n'
        script = 'mkdir -p "$1" && printf %s "$2" >"$1/hosts.toml"'
        self._cluster.enter("sh", "-c", script, "sh", f"{_HOSTS}/{host}", text)
