"""A real etcd and API server on this machine, and what each says of what it was asked."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench.process import DEADLINE, Process, free_port, program
from tests.cluster import settings
from tests.cluster.build import ETCD, KUBERNETES, ensure_binaries
from tests.until import until

NAMESPACE = "kube-system"
AGENTS = f"system:serviceaccount:{NAMESPACE}:npu-agent"
INFORMERS = "informers"
_ADMIN = "admin-token"
_AT_ONCE = 20
"""Calls of ours at the same time."""


@dataclass(frozen=True)
class Asked:
    """A request that the API server had, by its audit log."""

    at: float
    """When it came, by the wall clock."""
    user: str
    verb: str
    what: str
    """The resource, as ``nodes`` or ``nodes/status``."""
    code: int
    uri: str

    @property
    def node(self) -> str:
        """The node that it is of, by its URI; what names none counts as of a node of its own."""
        named = re.search(r"fleet-\d+", self.uri)
        return named[0] if named else f"{self.at}"

    @property
    def writes(self) -> bool:
        """Whether it may change anything."""
        return self.verb not in ("get", "list", "watch")


@dataclass(frozen=True)
class Mark:
    """A moment, by the wall clock, and how many bytes the audit log had then."""

    time: float
    size: int


class ApiServer:
    """The two processes. The API server can be stopped and started again."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.port, self._etcd_port = free_port(), free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca = directory / "ca.crt"
        self._directory, self._stack = directory, stack
        self._programs = ensure_binaries(KUBERNETES, ETCD)
        settings.write(directory, node="none", cgroup="none", kubelet={})
        tokens = directory / "tokens.csv"
        groups = f"system:serviceaccounts,system:serviceaccounts:{NAMESPACE}"
        rows = f'agents-token,{AGENTS},agents,"{groups}"\n'
        # The same priority and fairness as that of a service account.
        rows += f'informers-token,{INFORMERS},informers,"{groups},system:masters"\n'
        tokens.write_text(tokens.read_text(encoding="utf-8") + rows, encoding="utf-8")
        ours = [{"level": "Metadata", "users": [AGENTS, INFORMERS]}, {"level": "None"}]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": ours}
        policy["omitStages"] = ["RequestReceived"]
        (directory / "audit.yaml").write_text(json.dumps(policy), encoding="utf-8")
        self._audit = directory / "audit.log"
        peer = f"http://127.0.0.1:{free_port()}"
        self.etcd = self._program(
            "etcd",
            *_without(settings.etcd(f"{directory}/data")[1:], "listen", "advertise"),
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--quota-backend-bytes=8589934592",
        )
        self.process: Process | None = None
        self.ready_at = 0.0
        """When it was last ready, by the wall clock."""
        tls = ssl.create_default_context(cafile=str(self.ca))
        self._client = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {_ADMIN}"},
            connector=aiohttp.TCPConnector(ssl=tls, limit=_AT_ONCE),
        )

    @property
    def _etcd(self) -> str:
        return f"http://127.0.0.1:{self._etcd_port}"

    def _program(self, name: str, *arguments: str) -> Process:
        log = self._directory / f"{name}.log"
        command = (str(self._programs[name]), *arguments)
        return self._stack.enter_context(program(*command, log=log))

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> float:
        """Returns when it is ready, and when that was by the wall clock."""
        options = _without(settings.apiserver(self._directory, self._audit)[1:], "etcd", "secure-p")
        self.process = self._program(
            "kube-apiserver", *options, f"--secure-port={self.port}", f"--etcd-servers={self._etcd}"
        )
        await until(self._ready, deadline=DEADLINE)
        self.ready_at = time.time()
        return self.ready_at

    async def _ready(self) -> bool:
        try:
            async with self._client.get(f"{self.url}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """Ends it as a crash does."""
        if self.process:
            self.process.popen.kill()
            await asyncio.to_thread(self.process.popen.wait)

    async def close(self) -> None:
        await self._client.close()

    # --- objects --------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: Any = None, form: str = "json") -> Any:
        """As an administrator; the answer has to be a 2xx or a 409."""
        kind = {"Content-Type": f"application/{form}"}
        async with self._client.request(
            method, self.url + path, data=json.dumps(body), headers=kind
        ) as answer:
            text = await answer.text()
            assert answer.status < 300 or answer.status == 409, f"{method} {path}: {text}"
            return json.loads(text)

    async def prepare(self, nodes: Iterable[str]) -> None:
        """Makes Nodes as a kubelet would, and gives the agents the rights that they ship with."""
        for one in _rights():
            kind = f"{one['kind'].lower()}s"
            await self.ask("POST", f"/apis/rbac.authorization.k8s.io/v1/{kind}", one)
        await in_parallel(self._make_node(name) for name in nodes)

    async def _make_node(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        body = {"metadata": {"name": name, "labels": labels}}
        await self.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **body})
        status = {"status": {"nodeInfo": {"kubeletVersion": KUBERNETES.version}}}
        kind = "merge-patch+json"
        await self.ask("PATCH", f"/api/v1/nodes/{name}/status", status, kind)

    # --- what it was asked ----------------------------------------------------------------------

    def mark(self) -> Mark:
        """Now, for `asked`."""
        return Mark(time.time(), self._audit.stat().st_size)

    def asked(self, user: str, since: Mark) -> list[Asked]:
        """What a user has asked since then, in that order; a watch is there once it is open."""
        found = requests(self._audit, lambda one: bool(one["user"]["username"] == user), since.size)
        return [one for one in found if since.time <= one.at]

    async def metrics(self) -> dict[str, float]:
        """The API server's own, by name and labels."""
        async with self._client.get(f"{self.url}/metrics") as answer:
            return dict(_samples(await answer.text()))

    def cpu(self) -> float:
        """Seconds on a CPU that the running API server has used."""
        return self.process.spent().cpu if self.process else 0.0

    async def watches(self) -> int:
        """How many are open, of Nodes and ResourceSlices: those of the API server itself too."""
        found = await self.metrics()
        return int(
            sum(
                value
                for name, value in found.items()
                if name.startswith("apiserver_longrunning_requests{")
                and 'verb="WATCH"' in name
                and re.search(r'resource="(nodes|resourceslices)"', name)
            )
        )

    async def stored(self, key: str) -> list[int]:
        """Bytes that etcd has for each object below this key, key and value."""
        first, last = f"/registry/{key}".encode(), f"/registry/{key[:-1]}{chr(ord(key[-1]) + 1)}"
        body = {
            "key": base64.b64encode(first).decode(),
            "range_end": base64.b64encode(last.encode()).decode(),
        }
        async with self._client.post(f"{self._etcd}/v3/kv/range", json=body) as answer:
            found = (await answer.json()).get("kvs", ())
        return [sum(len(base64.b64decode(one[part])) for part in ("key", "value")) for one in found]


def requests(log: Path, wanted: Callable[[dict[str, Any]], bool], skip: int = 0) -> list[Asked]:
    """Those of an audit log that are wanted, from so many bytes on, in the order they came."""
    found: dict[str, Asked] = {}
    with log.open("rb") as lines:
        lines.seek(skip)
        for line in lines:
            if not line.endswith(b"\n"):
                break  # half-written
            if wanted(one := json.loads(line)):
                at = datetime.fromisoformat(one["requestReceivedTimestamp"]).timestamp()
                found[one["auditID"]] = _asked(one, at)
    return sorted(found.values(), key=lambda one: one.at)


def _asked(one: dict[str, Any], at: float) -> Asked:
    reference = one.get("objectRef", {})
    parts = (reference.get("resource", one["requestURI"]), reference.get("subresource"))
    return Asked(
        at=at,
        user=one["user"]["username"],
        verb=one["verb"],
        what="/".join(filter(None, parts)),
        code=one.get("responseStatus", {}).get("code", 0),
        uri=one["requestURI"],
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def _rights() -> Iterator[dict[str, Any]]:
    """The roles of the manifests with DRA and the Node condition, and their bindings."""
    root = Path(__file__).parents[2] / "k8s"
    found = [
        one
        for name in ("rbac.yaml", "components/dra/rbac.yaml")
        for one in yaml.safe_load_all((root / name).read_bytes())
    ]
    component = yaml.safe_load((root / "components/node-condition/kustomization.yaml").read_bytes())
    for patch in component["patches"]:
        if patch["target"]["kind"] == "ClusterRole":
            found[0]["rules"] += [one["value"] for one in yaml.safe_load(patch["patch"])]
    for one in found:
        for subject in one.get("subjects", ()):
            subject["namespace"] = NAMESPACE
    return iter(found)


def _without(options: Iterable[str], *beginnings: str) -> list[str]:
    return [one for one in options if not one.startswith(tuple(f"--{each}" for each in beginnings))]


async def in_parallel(calls: Iterable[Any]) -> None:
    """Awaits all, a few at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for one in waiting:
            await one

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work())


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[ApiServer]:
    """Runs both meanwhile; their files and logs go to `directory`."""
    with ExitStack() as stack:
        server = ApiServer(directory, stack)
        try:
            await server.start()
            yield server
        finally:
            await server.close()


def most_nodes(asked: Iterable[tuple[float, str]]) -> int:
    """The most nodes that asked within any second: when, in order, and which."""
    window: deque[tuple[float, str]] = deque()
    counts: Counter[str] = Counter()
    most = 0
    for at, node in asked:
        window.append((at, node))
        counts[node] += 1
        while window[0][0] < at - 1.0:
            _, old = window.popleft()
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        most = max(most, len(counts))
    return most


def peak(times: Sequence[float], seconds: float) -> int:
    """The most of these, in order, within so many seconds."""
    first = most = 0
    for last, at in enumerate(times):
        while times[first] < at - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
