"""A real Kubernetes of one node: `Cluster.start(...)`, talk to it, `stop()`.

etcd, API server, controller manager, scheduler, containerd and a kubelet run in namespaces of
their own (sandbox.py); nothing leaves them and nothing on the host is touched. Everything waits
for a condition with a deadline; a process that dies meanwhile ends the wait with its last words.
`Cluster.join` adds a second node: containerd and a kubelet in namespaces of its own.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast
from urllib.parse import urlencode

from . import network, settings
from .build import CONTAINERD, ETCD, KUBELETS, KUBERNETES, RELEASE, ensure_binaries, ensure_packages
from .images import pause
from .sandbox import Process, Sandbox, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

ADMIN = "admin-token"
RESOURCES = {
    "deployment": ("apis/apps/v1", "deployments"),
    "event": ("api/v1", "events"),
    "job": ("apis/batch/v1", "jobs"),
    "node": ("api/v1", "nodes"),
    "pod": ("api/v1", "pods"),
    "resourceclaim": ("apis/resource.k8s.io/v1", "resourceclaims"),
    "resourcequota": ("api/v1", "resourcequotas"),
    "resourceslice": ("apis/resource.k8s.io/v1", "resourceslices"),
    "validatingadmissionpolicy": (
        "apis/admissionregistration.k8s.io/v1",
        "validatingadmissionpolicies",
    ),
}
"""What `get` and `list` know: each kind's API and its name in paths."""
START_TIMEOUT = 60.0
"""Seconds that any step of starting may take; on an idle machine all take under ten together."""
COMMAND_TIMEOUT = 60.0
WAIT_TIMEOUT = 30.0


class ClusterError(RuntimeError):
    pass


@dataclass(frozen=True)
class State:
    node_name: str
    address: str
    kubelet: str
    path: str
    processes: dict[str, Process]


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]


class Cluster:
    """A node of a running Kubernetes. Get one from `start` or `attach`; also a context manager.

    That of `start` has the control plane as well, and is the only node until another one joins.

    Attributes:
        workdir: its directory; `logs/` in it has a file per process.
        node_name: the Node's name.
        kubelet: the kubelet's version.
        host_root: the simulated host tree. What is written to `host_root/dev` is /dev for the
            node's containerd at once, so a device plugin's `/dev/npu0` is
            `host_root/dev/npu0`; give it to a Pod as hostPath and to npu-agent as --host-root.
            `dev` holds the usual devices too: a simulator must leave them alone.
        kubelet_dir: the kubelet's /var/lib/kubelet, with device-plugins and pod-resources.
        static_pods: a Pod's manifest that is put here is run by the kubelet alone, with or without
            an API server, until the file is gone.
        etc_dir: what was written to the node's /etc (an overlay over the host's).
        run_dir: the node's /run, with cdi.
        kubeconfig: of an administrator; its server address exists inside the namespaces only.
    """

    def __init__(self, sandbox: Sandbox, state: State) -> None:
        self.workdir = sandbox.directory
        self.node_name = state.node_name
        self.kubelet = state.kubelet
        self.host_root = self.workdir / "root"
        self.kubelet_dir = self.workdir / "kubelet"
        self.static_pods = self.kubelet_dir / "static-pods"
        self.etc_dir = self.workdir / "etc"
        self.run_dir = self.workdir / "run"
        self.kubeconfig = self.workdir / "config" / "admin.kubeconfig"
        self._config = self.workdir / "config"
        self._audit_log = self.workdir / "logs" / "audit.log"
        self._sandbox = sandbox
        self._state = state

    @property
    def pid(self) -> int:
        return self._sandbox.init.pid

    # --- life -----------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        workdir: Path,
        kubelet: str = RELEASE,
        node_name: str = "npu-node-1",
        *,
        kubelet_config: Mapping[str, Any] | None = None,
        keep: bool = False,
    ) -> Cluster:
        """Start a cluster and return when its Node is Ready and pods can be created.

        Builds and installs what is missing first, and ends what crashed runs left behind.

        Args:
            workdir: absolute, at most 60 bytes, not below /run, /etc, /dev, /var/lib or /var/log.
            kubelet: its version, a key of `KUBELETS`; the rest is `RELEASE`.
            node_name: the Node's name.
            kubelet_config: KubeletConfiguration fields that replace the ones in settings.py.
            keep: the cluster goes on when this process has ended, until someone stops it; without,
                the next start of any cluster takes away what this process failed to stop.
        """
        ensure_packages()
        # Of the control plane's build the kubelet is overridden by the one asked for.
        binaries = ensure_binaries(KUBERNETES, ETCD, CONTAINERD)
        binaries |= ensure_binaries(KUBELETS[kubelet])
        directories = dict.fromkeys(str(binaries[name].parent) for name in ("kubelet", *binaries))

        sandbox = Sandbox.start(workdir, settings.NODE_ADDRESS, settings.SERVICE_ADDRESS, keep=keep)
        path = ":".join([*directories, "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
        cluster = cls(sandbox, State(node_name, settings.NODE_ADDRESS, kubelet, path, {}))
        try:
            settings.write(
                cluster._config,
                node=node_name,
                cgroup=sandbox.cgroup,
                kubelet=kubelet_config or {},
            )
            cluster.static_pods.mkdir()
            cluster._start_processes(pause().archive)
        except BaseException:
            sandbox.stop()
            raise
        return cluster

    def join(
        self, workdir: Path, node_name: str, *, kubelet_config: Mapping[str, Any] | None = None
    ) -> Cluster:
        """Start a second node of this cluster, and return when it is ready.

        What asks the API server does it as from the first node; the API server, its audit log and
        the rest of the control plane are the first node's alone. Stop this one before that one.

        Args:
            workdir: see `start`.
            node_name: the second Node's name.
            kubelet_config: see `start`.
        """
        address = settings.SECOND_NODE_ADDRESS
        sandbox = Sandbox.start(workdir, address)
        second = Cluster(sandbox, State(node_name, address, self.kubelet, self._state.path, {}))
        try:
            settings.write_second(
                second._config,
                self._config,
                node=node_name,
                cgroup=sandbox.cgroup,
                kubelet=kubelet_config or {},
            )
            second.static_pods.mkdir()
            self._sandbox.connect(sandbox)
            self.enter(*_route(settings.SECOND_POD_RANGE, address))
            second.enter(*_route(settings.POD_RANGE, self._state.address))
            # A DaemonSet has one hostPath for all of its Pods.
            second.enter("mount", "--rbind", str(second.host_root), str(self.host_root))
            second._start_second(pause().archive)
        except BaseException:
            sandbox.stop()
            raise
        return second

    @classmethod
    def attach(cls, workdir: Path) -> Cluster:
        """The cluster that another process started in `workdir` with `keep`."""
        sandbox = Sandbox.attach(workdir)
        data = json.loads((workdir / "config" / "state.json").read_text(encoding="utf-8"))
        data["processes"] = {name: Process(**fields) for name, fields in data["processes"].items()}
        return cls(sandbox, State(**data))

    def stop(self) -> None:
        """Kill everything, pods too, and delete everything but the logs. Safe to call twice."""
        self._sandbox.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_processes(self, pause_archive: Path) -> None:
        sandbox, config = self._sandbox, self._config
        self._spawn("etcd", settings.etcd("/var/lib/etcd"))
        self._spawn("containerd", self._containerd())
        self._await("etcd", "listening", lambda: sandbox.listening(settings.ETCD_PORT))
        self._spawn("apiserver", settings.apiserver(config, self._audit_log))
        self._await_containerd()
        self.import_image(pause_archive)
        self._await_api_server()
        self._spawn("kubelet", self._kubelet())
        self._spawn("controller-manager", settings.controller_manager(config))
        self._spawn("scheduler", settings.scheduler(config))
        self.wait_for("the node to be ready", lambda: self._node_is_ready(0), START_TIMEOUT)
        # Without it the admission of any Pod fails.
        self._await(
            "controller-manager",
            "giving the default namespace its service account",
            lambda: self._answers("/api/v1/namespaces/default/serviceaccounts/default"),
        )

    def _start_second(self, pause_archive: Path) -> None:
        self._spawn("containerd", self._containerd())
        self._await_containerd()
        self.import_image(pause_archive)
        self._spawn("kubelet", self._kubelet())
        self.wait_for("the node to be ready", lambda: self._node_is_ready(0), START_TIMEOUT)

    def _spawn(self, name: str, command: list[str]) -> None:
        env = {"PATH": self._state.path}
        self._state.processes[name] = self._sandbox.spawn(name, *command, env=env)
        (self._config / "state.json").write_text(json.dumps(asdict(self._state)), encoding="utf-8")

    def _await(self, name: str, what: str, condition: Callable[[], bool]) -> None:
        process = self._state.processes[name]
        if not wait_until(lambda: condition() or not process.alive, START_TIMEOUT, 0.05):
            raise ClusterError(f"{name}: not {what}: {self._sandbox.tail(name)}")
        if not process.alive:
            raise ClusterError(f"{name} ended before {what}: {self._sandbox.tail(name)}")

    def _await_containerd(self) -> None:
        self._await(
            "containerd", "listening", (self.run_dir / "containerd" / "containerd.sock").exists
        )

    def _await_api_server(self) -> None:
        self._await("apiserver", "ready", lambda: self._answers("/readyz"))

    def _answers(self, path: str) -> bool:
        with suppress(ClusterError):
            self._read(path)
            return True
        return False

    def _node_is_ready(self, since: float) -> bool:
        if not self.kubelet_runs:
            raise ClusterError(f"the kubelet has ended: {self._sandbox.tail('kubelet')}")
        node = self.get("node", self.node_name)
        conditions = {c["type"]: c for c in node["status"].get("conditions", ())}
        ready = conditions["Ready"]
        assert ready["status"] == "True", ready
        # Not what an earlier kubelet said: the API server believes that for 40 s.
        assert datetime.fromisoformat(ready["lastHeartbeatTime"]).timestamp() > since, ready
        # A taint goes a moment after its cause, and until then no Pod is scheduled. Who cordons a
        # Node means it.
        taints = [one["key"] for one in node["spec"].get("taints", ())]
        assert set(taints) <= {"node.kubernetes.io/unschedulable"}, taints
        return True

    def _kubelet_knows_pods(self) -> bool:
        def uids(pods: Iterable[dict[str, Any]]) -> set[str]:
            return {pod["metadata"]["uid"] for pod in pods}

        node = self.node_name
        pods = self.objects("pod", fieldSelector=f"spec.nodeName={node},status.phase=Running")
        known = json.loads(self._read(f"/api/v1/nodes/{node}/proxy/pods")).get("items") or ()
        assert uids(pods) <= uids(known), uids(pods) - uids(known)
        return True

    # --- the kubelet ----------------------------------------------------------------------

    def start_kubelet(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when the Node is Ready, and the kubelet knows its Pods."""
        if self.kubelet_runs:
            raise ClusterError("the kubelet runs already")
        started = time.time()
        self._spawn("kubelet", self._kubelet())
        self.wait_for("the node to be ready", lambda: self._node_is_ready(started), timeout)
        # A moment later: until then `kubectl exec` finds no Pod.
        self.wait_for("the kubelet to know its pods", self._kubelet_knows_pods, timeout)

    def stop_kubelet(self) -> None:
        """Stop the kubelet as an upgrade does: TERM, then KILL after 10 seconds."""
        self._sandbox.terminate(self._state.processes["kubelet"], 10.0)

    def kill_kubelet(self) -> None:
        """Kill the kubelet as a crash does; its pods and its socket file stay."""
        self._sandbox.kill(self._state.processes["kubelet"])

    def signal_kubelet(self, number: int) -> None:
        """Send the kubelet a signal, such as SIGSTOP and SIGCONT for one that hangs."""
        self._sandbox.signal(self._state.processes["kubelet"], number)

    def _kubelet(self) -> list[str]:
        return settings.kubelet(self._config, self.node_name, self._state.address)

    @property
    def kubelet_runs(self) -> bool:
        return self._state.processes["kubelet"].alive

    # --- containerd -----------------------------------------------------------------------

    def restart_containerd(self) -> None:
        """As `systemctl restart containerd`: containers go on; return when it answers."""
        self._sandbox.terminate(self._state.processes["containerd"], 10.0)
        self._spawn("containerd", self._containerd())
        self._await("containerd", "answering", self._containerd_answers)

    def _containerd(self) -> list[str]:
        return ["containerd", "--config", f"{self._config}/containerd.toml"]

    def _containerd_answers(self) -> bool:
        ctr = ("ctr", "--address", settings.CONTAINERD_SOCKET, "version")
        return self.enter(*ctr, check=False).returncode == 0

    # --- the API server -------------------------------------------------------------------

    def stop_api_server(self) -> None:
        """Stop the API server: TERM, then KILL after 2 seconds; the rest runs on.

        Until it is started again, whatever here asks the API server raises ClusterError.
        """
        self._sandbox.terminate(self._state.processes["apiserver"], 2.0)

    def start_api_server(self, *options: str) -> None:
        """Start the API server with the data that it had; return when Pods get started again.

        It answers in a few seconds, but scheduler and kubelet, which have backed off, may look for
        it only after most of a minute. `options` are more of them, such as --feature-gates.
        """
        if self._state.processes["apiserver"].alive:
            raise ClusterError("the API server runs already")
        command = settings.apiserver(self._config, self._audit_log)
        self._spawn("apiserver", [*command, *options])
        self._await_api_server()
        name = "does-the-cluster-start-pods"
        run = ("run", name, f"--image={settings.PAUSE_IMAGE}", "--image-pull-policy=Never")
        self.kubectl(*run, "--restart=Never")

        def phase() -> object:
            return self.get("pod", name, "default")["status"]["phase"]

        self.wait_equal("the phase of a pod", phase, "Running", 2 * START_TIMEOUT)
        self.kubectl("delete", "pod", name, "--namespace=default", "--now")

    def audit(self) -> list[dict[str, Any]]:
        """The requests that the API server has answered so far, oldest first.

        Each is an audit.k8s.io/v1 Event at level Metadata: `verb`, `user.username`, `objectRef`
        (absent where no object is meant), `responseStatus.code`, `userAgent` and so on. What the
        node's own programs ask, several times a second, is left out (settings.py). Watches are
        there when they end. To see what comes from here on, keep the length and slice later.
        """
        lines = self._audit_log.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # not one half-written

    # --- the API --------------------------------------------------------------------------

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run calls it
        check: bool = True,
        timeout: float = COMMAND_TIMEOUT,
    ) -> str:
        """Run kubectl as an administrator; returns what it prints, errors too if it fails."""
        done = self.enter("kubectl", *arguments, input=input, check=check, timeout=timeout)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self._read(_path(kind, namespace, name))))

    def objects(
        self, kind: str, namespace: str | None = None, **selectors: str
    ) -> list[dict[str, Any]]:
        """The objects of a kind, of all namespaces unless one is given.

        `selectors` are `labelSelector` and `fieldSelector`.
        """
        answer = json.loads(self._read(f"{_path(kind, namespace)}?{urlencode(selectors)}"))
        return cast("list[dict[str, Any]]", answer["items"])

    def apply(self, manifest: str | dict[str, Any] | list[dict[str, Any]]) -> None:
        if isinstance(manifest, list):
            manifest = {"apiVersion": "v1", "kind": "List", "items": manifest}
        if isinstance(manifest, dict):
            # Not as YAML: kubectl would read PyYAML's plain `n` as false.
            manifest = json.dumps(manifest)
        self.kubectl("apply", "--filename", "-", input=manifest)

    def exec(self, pod: str, *command: str, namespace: str = "default") -> str:
        return self.kubectl("exec", "--namespace", namespace, pod, "--", *command)

    def logs(self, pod: str, namespace: str = "default") -> str:
        container = self.get("pod", pod, namespace)["spec"]["containers"][0]["name"]
        return self._read(f"{_path('pod', namespace, pod)}/log?container={container}")

    def token_for(
        self, service_account: str, namespace: str = "default", *, pod: str | None = None
    ) -> str:
        """A token of a service account, good for an hour; bound to `pod` as the kubelet's are."""
        bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}"] if pod else []
        scope = ("--namespace", namespace)
        return self.kubectl("create", "token", *scope, service_account, *bound).strip()

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        token: str,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask the API server as the owner of a token; "admin-token" is the administrator's.

        Of a watch the answer is its last event.
        """
        sent = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        text = None if body is None else json.dumps(body)
        status, text = self._ask(method, settings.SERVER + path, text, sent, self._tls())
        return Answer(status, json.loads((text.splitlines() or ["null"])[-1]))

    def _ask(
        self,
        method: str,
        url: str,
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[int, str]:
        try:
            return network.ask(self.pid, method, url, body, headers, tls, COMMAND_TIMEOUT)
        except (OSError, HTTPException) as error:
            raise ClusterError(f"{method} {url}: {error!r}") from None

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._config / "ca.crt"))

    def _read(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return _body(path, *self._ask("GET", settings.SERVER + path, None, headers, self._tls()))

    def inside(self, url: str) -> str:
        return _body(url, *self._ask("GET", url))

    def wait_for(
        self, description: str, predicate: Callable[[], T], timeout: float = WAIT_TIMEOUT
    ) -> T:
        """Poll until `predicate()` is true; returns what it returned.

        A predicate says "not yet" with a false value, or with the AssertionError, LookupError,
        ValueError (of ``(one,) = several``) or ClusterError of something that is not there yet.

        Args:
            description: what is waited for, for the error message.
            predicate: called about ten times a second.
            timeout: seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                value = predicate()
                if value:
                    return value
                seen = repr(value)
            except (AssertionError, LookupError, ValueError, ClusterError) as error:
                seen = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout:g} s for {description}; last saw {seen}")
            time.sleep(0.1)

    def wait_equal(
        self,
        description: str,
        read: Callable[[], object],
        wanted: object,
        timeout: float = WAIT_TIMEOUT,
    ) -> None:
        """Poll until `read()` is the wanted value; see `wait_for`."""

        def equal() -> bool:
            seen = read()
            assert seen == wanted, f"{seen!r}, not {wanted!r}"
            return True

        self.wait_for(description, equal, timeout)

    # --- the node -------------------------------------------------------------------------

    def start_program(self, name: str, command: list[str], port: int) -> None:
        """Start a program that ends with the cluster; return when it listens on a TCP port."""
        self._spawn(name, command)
        self._await(name, "listening", lambda: self._sandbox.listening(port))

    def import_image(self, archive: Path, *, namespace: str = "k8s.io") -> None:
        """Give containerd the images of an OCI archive; Pods need `imagePullPolicy: Never`."""
        ctr = ("ctr", "--address", settings.CONTAINERD_SOCKET, "--namespace", namespace)
        with archive.open("rb") as stream:  # the archive's path may not exist inside
            done = subprocess.run(
                self.command(*ctr, "images", "import", "-"), stdin=stream, capture_output=True
            )
        if done.returncode != 0:
            raise ClusterError(f"import of {archive}: {done.stderr.decode().strip()}")

    def command(self, *command: str) -> list[str]:
        env = (f"PATH={self._state.path}", f"KUBECONFIG={self.kubeconfig}")
        return self._sandbox.command("env", *env, f"KUBECACHEDIR={self.workdir}/run/kube", *command)

    def enter(
        self,
        *command: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run calls it
        check: bool = True,
        timeout: float = COMMAND_TIMEOUT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside the cluster's namespaces: its network, /dev, /run, /var/lib."""
        # The deadline is kept inside: to kill nsenter would leave the command itself running.
        done = subprocess.run(
            self.command("timeout", "--kill-after=5", f"{timeout}", *command),
            input=input or "",
            capture_output=True,
            text=True,
        )
        if check and done.returncode != 0:
            reason = f"took longer than {timeout:g} s" if done.returncode == 124 else done.stderr
            raise ClusterError(f"{' '.join(command)}: {reason.strip()}")
        return done


def _route(pods: str, node: str) -> tuple[str, ...]:
    """The command by which a node finds the Pods of another one."""
    return ("ip", "route", "add", pods, "via", node, "dev", "node0", "onlink")


def _path(kind: str, namespace: str | None, name: str = "") -> str:
    api, plural = RESOURCES[kind]
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"/{api}{scope}/{plural}{name and f'/{name}'}"


def _body(path: str, status: int, text: str) -> str:
    if status != 200:
        raise ClusterError(f"GET {path}: {status}: {text.strip()}")
    return text
