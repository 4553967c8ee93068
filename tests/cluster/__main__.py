"""`python -m tests.cluster`: a Kubernetes to play with."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from . import images
from .build import (
    HELM,
    KUBELETS,
    REGISTRY,
    RELEASE,
    BuildError,
    ensure_binaries,
    ensure_packages,
)
from .cache import cache_dir
from .node import Cluster, ClusterError
from .sandbox import SandboxError

USAGE = """\
Node {cluster.node_name} is ready (kubelet {cluster.kubelet}, {seconds:.0f} s).
Images in it, with `imagePullPolicy: Never`: {images}

  python -m tests.cluster kubectl get nodes        one command
  python -m tests.cluster shell                    a shell with kubectl, inside the namespaces
  npu-agent simulate {cluster.host_root}     simulated cards: /dev and /sys of the node
  ls {cluster.kubelet_dir}/device-plugins
  tail -f {cluster.workdir}/logs/kubelet.log
  tail -f {cluster.workdir}/logs/audit.log     what the API server was asked, by whom
  python -m tests.cluster down                     everything away
"""


def main() -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and leave it running")
    up.add_argument("--kubelet", choices=KUBELETS, default=RELEASE)
    up.add_argument("--agent", action="store_true", help="build npu-agent's image and import it")
    commands.add_parser("down", help="stop it and delete everything")
    commands.add_parser("shell", help="a shell in it, with kubectl")
    commands.add_parser("build", help="build and install what is missing, and the images")
    kubectl = commands.add_parser("kubectl", help="run kubectl", add_help=False)
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    options, rest = parser.parse_known_args()
    if options.command != "kubectl" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    try:
        return _run(options, rest)
    except (BuildError, SandboxError, ClusterError) as error:
        print(error, file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    workdir = cache_dir().resolve() / "cluster"
    if options.command == "build":
        ensure_packages()
        ensure_binaries()
        # For tests/e2e/journey: no test has to wait for a build.
        ensure_binaries(HELM, REGISTRY)
        for image in (images.pause(), images.workload(), images.agent(), images.scheduler()):
            print(f"{image.name}\t{image.archive}")
        return 0
    if options.command == "up":
        return _up(workdir, options.kubelet, with_agent=options.agent)
    cluster = Cluster.attach(workdir)
    if options.command == "down":
        cluster.stop()
        return 0
    # Entering the namespaces leads to "/", and `kubectl apply -k k8s/` is of here.
    here = ("env", f"--chdir={Path.cwd()}")
    if options.command == "shell":
        prompt = {**os.environ, "PS1": "(cluster) \\w# "}
        return subprocess.run(cluster.command(*here, "bash", "--norc", "-i"), env=prompt).returncode
    kubectl = cluster.command(*here, "kubectl", *rest, *options.arguments)
    return subprocess.run(kubectl).returncode


def _up(workdir: Path, kubelet: str, *, with_agent: bool) -> int:
    ensure_packages()
    extra = [images.workload()] + ([images.agent()] if with_agent else [])
    ensure_binaries()
    started = time.monotonic()
    cluster = Cluster.start(workdir, kubelet, keep=True)
    seconds = time.monotonic() - started
    for image in extra:
        cluster.import_image(image.archive)
    names = ", ".join(image.name for image in extra)
    print(USAGE.format(cluster=cluster, seconds=seconds, images=names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
