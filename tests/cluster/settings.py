"""The files and command lines that make etcd, containerd, the control plane and a kubelet a node.

All addresses are from the ranges kept for documentation; they exist in the cluster's own network
namespaces only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NODE_ADDRESS = "192.0.2.254"
POD_RANGE = "192.0.2.0/25"
SECOND_NODE_ADDRESS = "203.0.113.254"
SECOND_POD_RANGE = "203.0.113.0/25"
SERVICE_ADDRESS = "198.51.100.1"
SERVICE_RANGE = "198.51.100.0/24"
SERVER = f"https://{SERVICE_ADDRESS}"
API_PORT = 443
"""The API server's own port is the service port, so the service address needs no kube-proxy."""
ETCD_PORT = 2379
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
PAUSE_IMAGE = "localhost/pause:1"


def write(directory: Path, *, node: str, cgroup: str, kubelet: Mapping[str, Any]) -> None:
    """`kubelet` are fields of its configuration that replace whole fields of the ones here."""
    _write_certificates(directory)
    _write_identities(directory)
    _write_audit_policy(directory)
    _write_kubelet_identity(directory, directory, node)
    _write_containerd(directory, POD_RANGE)
    _write_kubelet(directory, cgroup, kubelet)


def write_second(
    directory: Path, first: Path, *, node: str, cgroup: str, kubelet: Mapping[str, Any]
) -> None:
    """Write the files of a second node; `first` has those of the cluster's first one."""
    for name in ("ca.crt", "admin.kubeconfig"):
        shutil.copy(first / name, directory)
    _write_kubelet_identity(directory, first, node)
    _write_containerd(directory, SECOND_POD_RANGE)
    _write_kubelet(directory, cgroup, kubelet)


def _write_certificates(directory: Path) -> None:
    """Make a throw-away CA, and the API server's certificates: its own and that for kubelets."""
    ca = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign,digitalSignature"
    server = (
        "extendedKeyUsage=serverAuth\n"
        f"subjectAltName=IP:127.0.0.1,IP:{SERVICE_ADDRESS},IP:{NODE_ADDRESS},"
        "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
        "DNS:kubernetes.default.svc.cluster.local"
    )
    for name, subject, extensions in (
        ("ca", "/CN=test-cluster-ca", ca),
        ("apiserver", "/CN=kube-apiserver", server),
        # system:masters, or the kubelet refuses logs and exec.
        (
            "kubelet-client",
            "/O=system:masters/CN=kube-apiserver-kubelet-client",
            "extendedKeyUsage=clientAuth",
        ),
    ):
        _write_certificate(
            directory, None if name == "ca" else directory, name, subject, extensions
        )
    _openssl(directory, "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", "sa.key")
    _openssl(directory, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def _write_certificate(
    directory: Path, authority: Path | None, name: str, subject: str, extensions: str
) -> None:
    """Make a key and its certificate; the directory `authority` has the CA, None: it is one."""
    (directory / f"{name}.ext").write_text(
        f"[req]\ndistinguished_name=name\n[name]\n[ext]\n{extensions}\n", encoding="utf-8"
    )
    signed = ["-CA", f"{authority}/ca.crt", "-CAkey", f"{authority}/ca.key"] if authority else []
    _openssl(
        directory,
        *["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"],
        *["-days", "30", "-subj", subject, "-config", f"{name}.ext", "-extensions", "ext"],
        *["-keyout", f"{name}.key", "-out", f"{name}.crt", *signed],
    )


def _write_identities(directory: Path) -> None:
    """Write the API server's token file, and a kubeconfig for each that is in it."""
    rows = []
    for name, user, group in (
        ("admin", "admin", "system:masters"),
        ("controller-manager", "system:kube-controller-manager", ""),
        ("scheduler", "system:kube-scheduler", ""),
    ):
        rows.append(f'{name}-token,{user},{name},"{group}"\n')
        _write_kubeconfig(directory, name, {"token": f"{name}-token"})
    (directory / "tokens.csv").write_text("".join(rows), encoding="utf-8")


def _write_kubelet_identity(directory: Path, authority: Path, node: str) -> None:
    """Write the kubelet's credentials: a Node may join when the API server runs already."""
    subject, usage = f"/O=system:nodes/CN=system:node:{node}", "extendedKeyUsage=clientAuth"
    _write_certificate(directory, authority, "kubelet", subject, usage)
    files = {
        "client-certificate": f"{directory}/kubelet.crt",
        "client-key": f"{directory}/kubelet.key",
    }
    _write_kubeconfig(directory, "kubelet", files)


def _write_kubeconfig(directory: Path, name: str, user: Mapping[str, str]) -> None:
    cluster = {"server": SERVER, "certificate-authority": f"{directory}/ca.crt"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        "current-context": "test",
    }
    (directory / f"{name}.kubeconfig").write_text(json.dumps(config), encoding="utf-8")


def _write_audit_policy(directory: Path) -> None:
    """Write what the API server's audit log has: who asked what, but not the node's own chatter."""
    own = ("apiserver", "kube-controller-manager", "kube-scheduler")
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [
            {"level": "None", "users": [f"system:{name}" for name in own]},
            {"level": "None", "userGroups": ["system:nodes"]},
            {"level": "Metadata"},
        ],
    }
    (directory / "audit.yaml").write_text(json.dumps(policy), encoding="utf-8")


def _write_containerd(directory: Path, pods: str) -> None:
    """Write containerd's configuration and its one network, with the range of its Pods."""
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    images = "plugins.'io.containerd.cri.v1.images'"
    (directory / "containerd.toml").write_text(
        f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[{images}]
  snapshotter = "overlayfs"
  [{images}.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
  [{images}.registry]
    config_path = "/etc/containerd/certs.d"

[{runtime}]
  # Machines without CAP_SYS_RESOURCE cannot lower a score.
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = {json.dumps(CDI_DIRECTORIES)}
  [{runtime}.cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{directory}/cni"
""",
        encoding="utf-8",
    )
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": addresses}
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
    (directory / "cni").mkdir()
    (directory / "cni" / "pods.conflist").write_text(json.dumps(network), encoding="utf-8")


def _write_kubelet(directory: Path, cgroup: str, overrides: Mapping[str, Any]) -> None:
    """Write the kubelet's configuration; JSON, which is YAML."""
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{directory}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "staticPodPath": "/var/lib/kubelet/static-pods",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # The machine's own disk may be nearly full; that is not what the tests are about.
        "evictionHard": {"memory.available": "1Mi"},
        "imageGCHighThresholdPercent": 100,
        # How soon a test sees what the kubelet allocates.
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "1s",
        **overrides,
    }
    (directory / "kubelet.yaml").write_text(json.dumps(config, indent=2), encoding="utf-8")


def etcd(data: str) -> list[str]:
    return [
        "etcd",
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        f"--listen-client-urls=http://127.0.0.1:{ETCD_PORT}",
        f"--advertise-client-urls=http://127.0.0.1:{ETCD_PORT}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]


def apiserver(config: Path, audit_log: Path) -> list[str]:
    return [
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        "--bind-address=0.0.0.0",
        f"--secure-port={API_PORT}",
        f"--advertise-address={SERVICE_ADDRESS}",
        "--endpoint-reconciler-type=none",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # Not the node's name first, as there is no DNS.
        "--kubelet-preferred-address-types=InternalIP",
        f"--audit-policy-file={config}/audit.yaml",
        f"--audit-log-path={audit_log}",
        # In megabytes: in one file, however long a test run is.
        "--audit-log-maxsize=10000",
        f"--token-auth-file={config}/tokens.csv",
        f"--client-ca-file={config}/ca.crt",
        f"--tls-cert-file={config}/apiserver.crt",
        f"--tls-private-key-file={config}/apiserver.key",
        f"--kubelet-client-certificate={config}/kubelet-client.crt",
        f"--kubelet-client-key={config}/kubelet-client.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={config}/sa.pub",
        f"--service-account-signing-key-file={config}/sa.key",
    ]


def controller_manager(config: Path) -> list[str]:
    return [
        "kube-controller-manager",
        f"--kubeconfig={config}/controller-manager.kubeconfig",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={config}/sa.key",
        f"--root-ca-file={config}/ca.crt",
        # Each controller asks for its own credentials; at the default of 20/s that takes 4 s.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        # How soon a Node that is ready loses the taint of one that is not; 5 s by default.
        "--node-monitor-period=500ms",
    ]


def scheduler(config: Path) -> list[str]:
    return [
        "kube-scheduler",
        f"--kubeconfig={config}/scheduler.kubeconfig",
        "--leader-elect=false",
    ]


def kubelet(config: Path, node: str, address: str) -> list[str]:
    return [
        "kubelet",
        f"--config={config}/kubelet.yaml",
        f"--kubeconfig={config}/kubelet.kubeconfig",
        f"--hostname-override={node}",
        f"--node-ip={address}",
        "--root-dir=/var/lib/kubelet",
    ]


def _openssl(directory: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["openssl", *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")
