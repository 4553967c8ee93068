"""The programs a one-node Kubernetes is made of: built from Go modules, or installed from Debian.

No binary is downloaded: only the Go module proxy and Debian's packages are needed. The first
build takes minutes (Kubernetes 1.37.2 about seven on two cores), later runs find it in the cache.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from .cache import cache_dir, cached

logger = logging.getLogger(__name__)

PACKAGES = (
    "busybox-static",
    "buildah",
    "containernetworking-plugins",
    "debootstrap",
    "gcc",
    "iproute2",
    "iptables",
    "libc6-dev",
    "openssl",
    "pciutils",
    "prometheus",
    "psmisc",
    "runc",
)
"""Debian packages that building and running need."""

GO_VERSION = "1.26.8"
"""The Go toolchain that is fetched where there is none new enough."""
GO_MINIMUM = (1, 26)
"""What Kubernetes 1.37's go.mod asks for."""


class BuildError(RuntimeError):
    """Something needed could not be built or installed; the message says what and where to look."""


@dataclass(frozen=True, kw_only=True)
class GoBuild:
    """Programs built from one Go module at one version, or only its manifests."""

    name: str
    """Name and version, for people and for the cache."""
    module: str
    version: str
    checksum: str
    """Its `h1:` sum. The module's own go.sum then pins what it depends on."""
    packages: tuple[str, ...]
    """The main packages, relative to the module."""
    tags: tuple[str, ...] = ()


RELEASES = {
    version: GoBuild(
        name=f"kubernetes-{version}",
        module="k8s.io/kubernetes",
        version=f"v{version}",
        checksum=checksum,
        packages=(
            "cmd/kubelet",
            "cmd/kube-apiserver",
            "cmd/kube-controller-manager",
            "cmd/kube-scheduler",
            "cmd/kubectl",
        ),
    )
    for version, checksum in (
        ("1.37.2", "h1:A2VDEiObzkYqFTKhSsn0ZEb0RlLEXpHWj93gi2HqEwE="),
        ("1.36.3", "h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o="),
        ("1.35.4", "h1:o/8dBC/pHVpYoGV4OAIytAlNPZbdYVTXJHoYvXC4qzM="),
        ("1.34.4", "h1:Yy6R4QB8C9kJPp25GFqEvX5XQwY5qzKeqD0Xx6oAcmk="),
        ("1.30.14", "h1:MrlKXh9uhLIJpyxOeXhcndzRVSvwiV9iJ8NgH8nqPsg="),
    )
}
"""Control planes with their own kubelets; all but the newest for `make e2e-long` alone."""
NEWEST, *_, OLDEST = RELEASES
RELEASE = os.environ.get("NPU_AGENT_KUBERNETES", NEWEST)
"""The one that clusters run."""
KUBERNETES = RELEASES[RELEASE]
OLDEST_KUBELET = replace(RELEASES[OLDEST], name=f"kubelet-{OLDEST}", packages=("cmd/kubelet",))
ETCD = GoBuild(
    name="etcd-3.6.8",
    module="go.etcd.io/etcd/server/v3",
    version="v3.6.8",
    checksum="h1:U2strdSEy1U8qcSzRIdkYpvOPtBy/9i/IfaaCI9flZ4=",
    packages=("",),
)
CONTAINERD = GoBuild(
    name="containerd-2.4.2",
    module="github.com/containerd/containerd/v2",
    version="v2.4.2",
    checksum="h1:p6Qg+xbEz8lvwdhHDx0U469xENvp4LgGBx+E7djXkGw=",
    packages=("cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"),
    tags=("no_btrfs", "no_devmapper", "no_zfs"),
)
HELM = GoBuild(
    name="helm-4.3.1",
    module="helm.sh/helm/v4",
    version="v4.3.1",
    checksum="h1:UndCoLe9UPmNoL7IvWzaUXveL7T5t/ijoorEmgJdI9g=",
    packages=("cmd/helm",),
)
HELM_3 = GoBuild(
    name="helm-3.22.0",
    module="helm.sh/helm/v3",
    version="v3.22.0",
    checksum="h1:n1if5iQgHYsujPAcO5oonH/KiSNUmqmUF0iGVjSF3AU=",
    packages=("cmd/helm",),
)
REGISTRY = GoBuild(
    name="registry-3.1.2",
    module="github.com/distribution/distribution/v3",
    version="v3.1.2",
    checksum="h1:/Bv2YIqqSR00HiO49FT93hovy6r9IlrzwUDsJjCN5qg=",
    packages=("cmd/registry",),
)
KREW = GoBuild(
    name="krew-0.4.3",
    module="sigs.k8s.io/krew",
    version="v0.4.3",
    checksum="h1:nvV4ifUM+wuy8ITy32FAib240lXSbMeHOxizqVy6+U0=",
    packages=("cmd/krew",),
)
KUBE_SCORE = GoBuild(
    name="kube-score-1.20.0",
    module="github.com/zegl/kube-score",
    version="v1.20.0",
    checksum="h1:J1VqK86SunV4Gg8emPTmwUVxe0rmXnAs5K9ZUbGMKR8=",
    packages=("cmd/kube-score",),
)
ACTIONLINT = GoBuild(
    name="actionlint-1.7.12",
    module="github.com/rhysd/actionlint",
    version="v1.7.12",
    checksum="h1:vQ4GeJN86C0QH+gTUQcs8McmK62OLT3kmakPMtEWYnY=",
    packages=("cmd/actionlint",),
)
OPA = GoBuild(
    name="opa-1.22.4",
    module="github.com/open-policy-agent/opa",
    version="v1.22.4",
    checksum="h1:/sKtqt7GVSvXQn1sML2PSzl8tD/mTHF2pzQC3x1CV8k=",
    packages=("",),
)
OPA_OLDEST = GoBuild(
    name="opa-0.44.0",
    module="github.com/open-policy-agent/opa",
    version="v0.44.0",
    checksum="h1:sEZthsrWBqIN+ShTMJ0Hcz6a3GkYsY4FaB2S/ou2hZk=",
    packages=("",),
)
NODE_READINESS_CONTROLLER = GoBuild(
    name="node-readiness-controller-0.5.0",
    module="sigs.k8s.io/node-readiness-controller",
    version="v0.5.0",
    checksum="h1:i/WP739GZOpx9YXtQfzq7AZx+PhfYOUV1mxGQPmV498=",
    packages=("cmd",),
)
NODE_HEALTHCHECK_OPERATOR = GoBuild(
    name="node-healthcheck-operator-0.12.0",
    module="github.com/medik8s/node-healthcheck-operator",
    version="v0.12.0",
    checksum="h1:U3aEgam/TjU5dYwilD54LMCTWX1c/qMuVI3BqNqDcyM=",
    packages=("cmd",),
)
DRA_EXAMPLE_DRIVER = GoBuild(
    name="dra-example-driver-0.4.0",
    module="sigs.k8s.io/dra-example-driver",
    version="v0.4.0",
    checksum="h1:JaJJvAHPULxJNLD6LKTJY8NrS45eyqHSJWd8Q5dmS5k=",
    packages=("cmd/dra-example-kubeletplugin",),
)
GPU_PLUGIN = GoBuild(
    name="intel-gpu-plugin-0.36.0",
    module="github.com/intel/intel-device-plugins-for-kubernetes",
    version="v0.36.0",
    checksum="h1:K3XKhTDK9AQPXqOSePU+YwR2LzPumxWJ1R3skMPlnco=",
    packages=("cmd/gpu_plugin",),
)
SAMPLE_PLUGIN = replace(
    KUBERNETES, name=f"sample-plugin-{RELEASE}", packages=("test/images/sample-device-plugin",)
)
NFD = GoBuild(
    name="nfd-0.18.3",
    module="sigs.k8s.io/node-feature-discovery",
    version="v0.18.3",
    checksum="h1:q5/qpyxrasI/F6838lflFNGAUszpMNRuFwornPLYdxQ=",
    packages=("cmd/nfd-worker", "cmd/nfd-master"),
)
NODE_EXPORTER = GoBuild(
    name="node-exporter-1.12.1",
    module="github.com/prometheus/node_exporter",
    version="v1.12.1",
    checksum="h1:LzcZ6SqJRH2EULBz3Paa1t1uzQaaoo9domuz8FQDkiY=",
    packages=("",),
)
KUEUE = GoBuild(
    name="kueue-0.19.0",
    module="sigs.k8s.io/kueue",
    version="v0.19.0",
    checksum="h1:5yCu85qsJhvUVVxE0Csw546DDBcRwUXpBEOmEFlws34=",
    packages=("cmd/kueue",),
)
LEADER_WORKER_SET = GoBuild(
    name="lws-0.8.0",
    module="sigs.k8s.io/lws",
    version="v0.8.0",
    checksum="h1:DdhJ8QabwTfWgbgaHH2gdf8twliioHaoSfmDXRYEVU0=",
    packages=(),
)
JOB_SET = GoBuild(
    name="jobset-0.11.1",
    module="sigs.k8s.io/jobset",
    version="v0.11.1",
    checksum="h1:WgLEBnXTeX+4MxfVkIbfm4jIVgjvIY6Jfaei2okxKNk=",
    packages=(),
)
KSERVE = GoBuild(
    name="kserve-0.20.0",
    module="github.com/kserve/kserve",
    version="v0.20.0",
    checksum="h1:Bs7HxmGV4KFqqptDcWseKv+mwD4YOYHJWcuVgPG2Gug=",
    packages=(),
)
KUBERAY = GoBuild(
    name="kuberay-1.5.1",
    module="github.com/ray-project/kuberay/ray-operator",
    version="v1.5.1",
    checksum="h1:7FJYmB8oM+cnjv1VYCj/TfzRZG4XHvvt5Ayn5pZ5A1c=",
    packages=(),
)
_PROGRAMS = {
    ETCD: "etcd",
    NODE_READINESS_CONTROLLER: "node-readiness-controller",
    NODE_HEALTHCHECK_OPERATOR: "node-healthcheck-operator",
}
"""Programs that would else have the name of their directory."""
_MANIFESTS = {
    NODE_READINESS_CONTROLLER: (
        "config/crd/bases/readiness.node.x-k8s.io_nodereadinessrules.yaml",
        "config/rbac/role.yaml",
    ),
    NODE_HEALTHCHECK_OPERATOR: (
        "config/crd/bases/remediation.medik8s.io_nodehealthchecks.yaml",
        "config/rbac/role.yaml",
    ),
    KUEUE: (
        "config/components/webhook/manifests.yaml",
        *(
            f"config/components/crd/bases/kueue.x-k8s.io_{kind}.yaml"
            for kind in (
                "admissionchecks",
                "clusterqueues",
                "cohorts",
                "localqueues",
                "multikueueclusters",
                "multikueueconfigs",
                "provisioningrequestconfigs",
                "resourceflavors",
                "topologies",
                "workloadpriorityclasses",
                "workloads",
            )
        ),
    ),
    LEADER_WORKER_SET: ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",),
    KSERVE: (
        "config/crd/full/serving.kserve.io_inferenceservices.yaml",
        "config/crd/minimal/llmisvc/serving.kserve.io_llminferenceservices.yaml",
    ),
    KUBERAY: ("config/crd/bases/ray.io_rayclusters.yaml",),
    JOB_SET: ("config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",),
    NFD: ("deployment/helm/node-feature-discovery",),
}
"""By build, the manifests of its module that are kept, with its programs if it has some.

A directory is a chart.
"""
_INSTEAD = {
    NODE_HEALTHCHECK_OPERATOR: {"k8s.io/kube-aggregator": "v0.34.8"},
    NFD: {f"{NFD.module}/api/nfd": NFD.version},
}
"""By build, versions of modules in place of those that it names: not every proxy has those."""
KUBELETS = {RELEASE: KUBERNETES, **({OLDEST: OLDEST_KUBELET} if RELEASE == NEWEST else {})}
"""Those to test under this control plane: the newest has the oldest kubelet that we support too."""


def ensure_packages() -> None:
    """Install the Debian packages in `PACKAGES` that are missing.

    Raises:
        BuildError: this is not Debian, not root, or apt-get failed.
    """
    query = ("dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES)
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        raise BuildError(f"needs Debian, or its packages by hand: {' '.join(PACKAGES)}") from None
    lines = [line.split() for line in answer.splitlines()]
    missing = set(PACKAGES) - {name for name, state in lines if state == "installed"}
    if missing:
        _apt_install(sorted(missing))


def ensure_binaries(*builds: GoBuild) -> dict[str, Path]:
    """Build what is not in the cache yet; returns each program's path by its name.

    With no arguments: everything that any of the kubelets needs.

    Raises:
        BuildError: no Go, a module whose content is not the expected one, or a failed build.
    """
    binaries: dict[str, Path] = {}
    for build in builds or (*KUBELETS.values(), ETCD, CONTAINERD):
        directory = cached(build.name, asdict(build), partial(_build, build))
        binaries.update({path.name: path for path in directory.iterdir()})
    return binaries


def ensure_own(source: Path) -> Path:
    """Build the Go program in this directory of the repository, with its own go.mod and go.sum.

    Raises:
        BuildError: no Go, or a failed build.
    """
    files = {
        str(file.relative_to(source)): file.read_text(encoding="utf-8")
        for file in source.rglob("*.*")
    }

    def build(directory: Path) -> None:
        go, env = _go()
        env["GOFLAGS"] = "-mod=readonly -buildvcs=false"
        arguments = ["-trimpath", "-ldflags", "-s -w", "-o", str(directory / source.name), "."]
        _run([go, "build", *arguments], cwd=source, env=env, log=source.name)

    return cached(source.name, files, build) / source.name


def _apt_install(packages: list[str]) -> None:
    if os.geteuid() != 0:
        raise BuildError(f"not root, so please install: apt-get install {' '.join(packages)}")
    logger.info("installing Debian packages: %s", " ".join(packages))
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (install, ["apt-get", "update"], install):
        # Package lists are often missing or stale on a fresh machine: refreshed only when needed.
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if command is install and done.returncode == 0:
            return
    raise BuildError(f"apt-get could not install {' '.join(packages)}:\n{done.stderr}")


def _build(build: GoBuild, directory: Path) -> None:
    go, env = _go()
    source = _download(go, env, f"{build.module}@{build.version}", build.checksum)
    if build.packages:
        logger.info("building %s: minutes, but only this once", build.name)
        _compile(build, source, directory, go, env)
    for name in _MANIFESTS.get(build, ()):
        kept = directory / Path(name).name
        if (source / name).is_dir():
            # Files of a module are read-only.
            shutil.copytree(source / name, kept, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source / name, kept)


def _compile(build: GoBuild, source: Path, directory: Path, go: str, env: dict[str, str]) -> None:
    work = directory / "work"
    work.mkdir()

    # The module's own go.mod, as our main module's requirement, leads to the very versions that
    # it was released with. Its replacements are not followed then, so they are repeated here.
    module = ["module build", f"go {'.'.join(map(str, GO_MINIMUM))}"]
    module += [f"require {build.module} {build.version}"]
    staging = re.findall(
        r"^\s*(?:replace\s+)?(k8s\.io/\S+) => \./staging/", _read(source, "go.mod"), re.MULTILINE
    )
    replaced = dict.fromkeys(staging, f"v0.{build.version[3:]}") | _INSTEAD.get(build, {})
    module += [f"replace {name} => {name} {version}" for name, version in replaced.items()]
    (work / "go.mod").write_text("\n".join(module) + "\n", encoding="utf-8")
    (work / "go.sum").write_text(_read(source, "go.sum"), encoding="utf-8")

    flags = ["-s", "-w"]
    if staging:
        # Without the stamp the API server calls itself v0.0.0 and refuses some defaults.
        major, minor = build.version[1:].split(".")[:2]
        stamp = {"gitVersion": build.version, "gitMajor": major, "gitMinor": minor}
        flags += [f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamp.items()]
    arguments = ["-trimpath", "-ldflags", " ".join(flags), "-o", f"{directory}/"]
    arguments += ["-tags", ",".join(build.tags)] if build.tags else []
    arguments += [f"{build.module}/{package}".rstrip("/") for package in build.packages]
    _run([go, "build", *arguments], cwd=work, env=env, log=build.name)
    shutil.rmtree(work)
    if build in _PROGRAMS:
        (package,) = build.packages
        (directory / (package or "server")).rename(directory / _PROGRAMS[build])


def _read(source: Path, name: str) -> str:
    path = source / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _download(go: str, env: dict[str, str], module: str, checksum: str | None) -> Path:
    """Fetch a Go module into the module cache; returns where its files are."""
    download = [go, "mod", "download", "-json", module]
    answer = subprocess.run(download, cwd="/", env=env, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildError(f"cannot download {module}: {answer.stdout}{answer.stderr}")
    found = json.loads(answer.stdout)
    if checksum is not None and found["Sum"] != checksum:
        raise BuildError(f"{module} is {found['Sum']}, expected {checksum}: not what we reviewed")
    return Path(found["Dir"])


def _go() -> tuple[str, dict[str, str]]:
    """The go command, new enough, and the environment to run it in.

    Debian 12 has Go 1.19 only. Any Go can fetch a newer one, as toolchains are modules too; newer
    ones would do so themselves, unless told not to, which distributions do.
    """
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false"}
    if shutil.which("go") is None:
        _apt_install(["golang-go"])
    answer = subprocess.run(["go", "version"], cwd="/", env=env, capture_output=True, text=True)
    version = re.search(r"go(\d+)\.(\d+)", answer.stdout)
    if version is None:
        raise BuildError(f"cannot tell which Go this is: {answer.stdout}{answer.stderr}")
    if (int(version[1]), int(version[2])) >= GO_MINIMUM:
        return "go", env
    root = cached(f"go-{GO_VERSION}", "toolchain module", lambda d: _fetch_toolchain(env, d))
    return str(root / "bin" / "go"), {**env, "GOTOOLCHAIN": "local", "GOROOT": str(root)}


def _fetch_toolchain(env: dict[str, str], directory: Path) -> None:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    module = f"golang.org/toolchain@v0.0.1-go{GO_VERSION}.linux-{arch}"
    shutil.copytree(_download("go", env, module, None), directory, dirs_exist_ok=True)
    for path in (directory, *directory.rglob("*")):
        # The module cache is read-only, and modules do not carry the executable bit.
        executable = path.is_dir() or path.parent.name == "bin" or "pkg/tool" in str(path)
        path.chmod(0o755 if executable else 0o644)


def _run(command: list[str], *, cwd: Path, env: dict[str, str], log: str) -> None:
    """Run a long command with its output in the cache's `logs/`, quoted if it fails."""
    path = cache_dir() / "logs" / f"{log}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        tail = "\n".join(path.read_text(encoding="utf-8").splitlines()[-20:])
        raise BuildError(f"{log} failed ({path}):\n{tail}")
