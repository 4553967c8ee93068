"""A real Kubernetes of one node for tests and for people, without Docker and without a registry.

`Cluster.start(workdir)` for tests, `python -m tests.cluster` for people. `Cluster.join` adds a
second node. Needs Debian, root, and the package registries for the first run; later runs start from
the cache in seconds.
"""

from .build import KUBELETS, RELEASE, BuildError, ensure_binaries, ensure_packages
from .images import Image, agent, workload
from .node import Answer, Cluster, ClusterError
from .sandbox import SandboxError

__all__ = [
    "KUBELETS",
    "RELEASE",
    "Answer",
    "BuildError",
    "Cluster",
    "ClusterError",
    "Image",
    "SandboxError",
    "agent",
    "ensure_binaries",
    "ensure_packages",
    "workload",
]
