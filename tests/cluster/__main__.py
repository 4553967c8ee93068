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
from .build import KUBELETS, BuildError, ensure_binaries, ensure_packages
from .cache import cache_dir
from .node import Cluster, ClusterError
from .sandbox import SandboxError

USAGE = """\
Node {node} is ready (kubelet {kubelet}, {seconds:.0f} s). Images in it: {images}
(with `imagePullPolicy: Never`).

  python -m tests.cluster kubectl get nodes        one command
  python -m tests.cluster shell                    a shell with kubectl, inside the namespaces
  npu-agent simulate {root}     simulated cards: /dev and /sys of the node
  ls {kubelet_dir}/device-plugins
  tail -f {workdir}/logs/kubelet.log
  tail -f {workdir}/logs/audit.log     what the API server was asked, by whom
  python -m tests.cluster down                     everything away
"""


def main() -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and leave it running")
    up.add_argument("--kubelet", choices=KUBELETS, default="1.36.3")
    up.add_argument("--agent", action="store_true", help="build npu-agent's image and import it")
    commands.add_parser("down", help="stop it and delete everything")
    commands.add_parser("shell", help="a shell in it, with kubectl")
    commands.add_parser("image", help="build npu-agent's image and import it into the cluster")
    commands.add_parser("build", help="build and install what is missing, and the images")
    kubectl = commands.add_parser("kubectl", help="run kubectl", add_help=False)
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    options, rest = parser.parse_known_args()
    if options.command != "kubectl" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    workdir = cache_dir().resolve() / "cluster"
    try:
        if options.command == "build":
            ensure_packages()
            ensure_binaries()
            for image in (images.pause(), images.workload(), images.agent()):
                print(f"{image.name}\t{image.archive}")
        elif options.command == "up":
            _up(workdir, options.kubelet, with_agent=options.agent)
        else:
            cluster = Cluster.attach(workdir)
            if options.command == "down":
                cluster.stop()
            elif options.command == "image":
                cluster.import_image(images.agent().archive)
            elif options.command == "shell":
                prompt = {**os.environ, "PS1": "(cluster) \\w# "}
                shell = ["env", f"--chdir={Path.cwd()}", "bash", "--norc", "-i"]
                return subprocess.run(cluster.command(*shell), env=prompt).returncode
            else:
                # Entering the namespaces leads to "/", and `kubectl apply -k k8s/` is of here.
                command = ["env", f"--chdir={Path.cwd()}", "kubectl", *rest, *options.arguments]
                return subprocess.run(cluster.command(*command)).returncode
    except (BuildError, SandboxError, ClusterError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _up(workdir: Path, kubelet: str, *, with_agent: bool) -> None:
    ensure_packages()
    extra = [images.workload()] + ([images.agent()] if with_agent else [])
    ensure_binaries()
    started = time.monotonic()
    cluster = Cluster.start(workdir, kubelet, keep=True)
    seconds = time.monotonic() - started
    for image in extra:
        cluster.import_image(image.archive)
    print(
        USAGE.format(
            node=cluster.node_name,
            kubelet=kubelet,
            seconds=seconds,
            images=", ".join(image.name for image in extra),
            root=cluster.host_root,
            kubelet_dir=cluster.kubelet_dir,
            workdir=workdir,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
