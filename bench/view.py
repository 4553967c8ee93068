"""`kubectl npu` for a large cluster, by a real API server; the Nodes are objects alone."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.figure import Figure
from npu_agent.people.cluster.objects import AGENT
from npu_agent.vendors import DRA
from tests.cluster import Cluster, network, settings

PLUGIN = Path(sys.executable).with_name("kubectl-npu")
DRIVER = DRA.driver
RESOURCE = f"beta.{DRIVER.partition('.')[2]}/npu"
CARDS = 2
PODS = 5
"""Of each Node: one holds a part of a card, one is the agent's."""
PORT = 9100
WRITERS = 4
ROUNDS = 3
ADMIN = {"Authorization": "Bearer admin-token", "Content-Type": "application/json"}
_DRA = "/apis/resource.k8s.io/v1"
PLACES = {
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/default/pods",
    "ResourceClaim": f"{_DRA}/namespaces/default/resourceclaims",
    "ResourceSlice": f"{_DRA}/resourceslices",
    "DeviceClass": f"{_DRA}/deviceclasses",
}

Json = dict[str, Any]


async def view(nodes: int) -> AsyncIterator[Figure]:
    """Each command beside what kubectl itself takes to list the Pods; root, and `make e2e`'s."""
    with _cluster(nodes) as cluster:
        what = f"{nodes} Nodes, {PODS * nodes} Pods"
        kubectl = "kubectl", "get", "pods", "-A", "-o", "json"
        yield Figure(f"{' '.join(kubectl)}: {what}", _taken(cluster, *kubectl))
        kinds = "kubectl", "get", "nodes,resourceslices,resourceclaims", "-A", "-o", "json"
        yield Figure("kubectl get nodes,resourceslices,resourceclaims", _taken(cluster, *kinds))
        for words in (("nodes",), ("pods", "-A"), ("top", "-A"), ("why", "waits")):
            taken = _taken(cluster, str(PLUGIN), *words)
            yield Figure(f"kubectl npu {' '.join(words)}", taken, "<= 3 s")


def _taken(cluster: Cluster, *command: str) -> str:
    """The median, and what of it is CPU of the command; the first time is not counted."""
    taken, used = [], []
    for _ in range(ROUNDS + 1):
        began, before = time.perf_counter(), os.times()
        cluster.enter(*command)
        after = os.times()
        taken.append(time.perf_counter() - began)
        used.append(sum(after[2:4]) - sum(before[2:4]))
    return f"{statistics.median(taken[1:]):.2f} s, CPU {statistics.median(used[1:]):.2f} s"


@contextmanager
def _cluster(nodes: int) -> Iterator[Cluster]:
    """Without what would act on the Nodes, which have no kubelet."""
    with (
        tempfile.TemporaryDirectory(prefix="npu-view-", dir="/tmp") as workdir,
        Cluster.start(Path(workdir), node_name="npu-view") as cluster,
    ):
        for name in ("controller-manager", "scheduler"):
            cluster._sandbox.kill(cluster._state.processes[name])
        things = [[*_node(at)] for at in range(nodes)] + [[_class(), *_waiting()]]
        parts = [[one for each in things[at::WRITERS] for one in each] for at in range(WRITERS)]
        with ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(lambda part: _create(cluster, part), parts))
        pages = Path(workdir, "pages")
        pages.mkdir()
        (pages / "status.json").write_text(
            json.dumps({"cards": [_card(at) for at in range(CARDS)]}), encoding="utf-8"
        )
        server = [sys.executable, "-m", "http.server", str(PORT), f"--directory={pages}"]
        cluster.start_program("pages", server, PORT)
        yield cluster


def _card(at: int) -> Json:
    """A card of an agent's page, as far as it is read."""
    loads = [{"core": core, "utilization": 50.0} for core in range(8)]
    return {"name": f"npu{at}", "core_count": 8, "holders": [], "reading": {"cores": loads}}


def _create(cluster: Cluster, things: Iterable[Json]) -> None:
    """Creates them on one connection, each with its status."""
    server = urlsplit(settings.SERVER)
    host, port = server.hostname or "", server.port or 443
    tls = ssl.create_default_context(cafile=str(cluster._config / "ca.crt"))
    connection = http.client.HTTPSConnection(host, port, timeout=60)
    connection.sock = tls.wrap_socket(
        network.connect(cluster.pid, (host, port), 60), server_hostname=host
    )
    uids = {}
    for thing in things:
        path, status = PLACES[thing["kind"]], thing.pop("status", None)
        meta = _sent(connection, "POST", path, thing)["metadata"]
        uids[meta["name"]] = meta["uid"]
        for user in (status or {}).get("reservedFor", ()):
            user["uid"] = uids[user["name"]]
        if status:
            body = {**thing, "metadata": {**thing["metadata"], **meta}, "status": status}
            _sent(connection, "PUT", f"{path}/{meta['name']}/status", body)
    connection.close()


def _sent(connection: http.client.HTTPSConnection, method: str, path: str, body: Json) -> Json:
    connection.request(method, path, json.dumps(body), ADMIN)
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status in (200, 201), text
    found: Json = json.loads(text)
    return found


def _thing(kind: str, name: str, **fields: Any) -> Json:
    version = "v1" if kind in ("Node", "Pod") else "resource.k8s.io/v1"
    meta = {"name": name, **fields.pop("metadata", {})}
    return {"apiVersion": version, "kind": kind, "metadata": meta, **fields}


def _node(at: int) -> Iterator[Json]:
    """A Node with as much to say as a real one, its slices, its Pods, a claim of one of them."""
    name = f"node-{at:04}"
    there = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    images = [
        {"names": [f"registry.example.com/team/image-{n}@sha256:{n:064}"], "sizeBytes": 10**8}
        for n in range(50)
    ]
    conditions = [
        {"type": kind, "status": str(kind == "Ready"), "reason": "Kubelet", "message": "x" * 40}
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    ]
    status = {"allocatable": there, "capacity": there, "images": images, "conditions": conditions}
    labels = {"kubernetes.io/hostname": name, f"{RESOURCE}.count": str(CARDS)}
    yield _thing("Node", name, metadata={"labels": labels}, status=status)
    yield from _slices(name)
    device = f"npu{at % CARDS}-cores-0-3"
    yield _pod(f"holds-{name}", name, f"claim-{name}")
    yield _claim(f"claim-{name}", name, device)
    agent = _pod(f"agent-{name}", name)
    agent["metadata"]["labels"] = dict([AGENT.split("=")])
    agent["spec"]["containers"][0]["ports"] = [{"containerPort": PORT}]
    agent["status"]["podIP"] = settings.NODE_ADDRESS
    agent["status"]["podIPs"] = [{"ip": settings.NODE_ADDRESS}]
    yield agent
    for n in range(PODS - 2):
        yield _pod(f"plain-{n}-{name}", name)


def _slices(node: str) -> Iterator[Json]:
    cards = range(CARDS)
    spec: Json = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 2},
    }
    cores = {f"core-{n}": {"value": "1"} for n in range(8)}
    sets = [{"name": f"npu{card}", "counters": cores} for card in cards]
    yield _thing("ResourceSlice", f"{node}-counters", spec={**spec, "sharedCounters": sets})
    devices = [
        _device(node, card, first, width)
        for card in cards
        for width in (8, 4, 2, 1)
        for first in range(0, 8, width)
    ]
    yield _thing("ResourceSlice", f"{node}-devices", spec={**spec, "devices": devices})


def _device(node: str, card: int, first: int, width: int) -> Json:
    taken = {f"core-{n}": {"value": "1"} for n in range(first, first + width)}
    texts = {
        "type": "card" if width == 8 else "cores",
        "family": "rngd",
        "uuid": f"{node}-{card}",
        "serial": f"SN-{node}-{card}",
        "pciBusID": f"0000:{card:02x}:00.0",
        "resource.kubernetes.io/pcieRoot": f"pci0000:{card:02x}",
    }
    numbers = {"index": card, "cores": width, "numaNode": 0}
    return {
        "name": f"npu{card}" + ("" if width == 8 else f"-cores-{first}-{first + width - 1}"),
        "attributes": {
            **{key: {"string": text} for key, text in texts.items()},
            **{key: {"int": number} for key, number in numbers.items()},
            "driverVersion": {"version": "1.9.2"},
            "firmwareVersion": {"version": "1.2.3"},
        },
        "capacity": {"memory": {"value": f"{6 * width}Gi"}, "cores": {"value": str(width)}},
        "consumesCounters": [{"counterSet": f"npu{card}", "counters": taken}],
    }


def _request(*selectors: str) -> Json:
    chosen = [{"cel": {"expression": one}} for one in selectors]
    exactly = {"deviceClassName": DRIVER, "selectors": chosen}
    return {"devices": {"requests": [{"name": "npu", "exactly": exactly}]}}


def _claim(name: str, node: str, device: str) -> Json:
    result = {"request": "npu", "driver": DRIVER, "pool": node, "device": device}
    expression = {"key": "metadata.name", "operator": "In", "values": [node]}
    where = {"nodeSelectorTerms": [{"matchFields": [expression]}]}
    user = {"resource": "pods", "name": f"holds-{node}"}
    status = {
        "allocation": {"devices": {"results": [result]}, "nodeSelector": where},
        "reservedFor": [user],
    }
    return _thing("ResourceClaim", name, spec=_request(), status=status)


def _class() -> Json:
    spec = {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]}
    return _thing("DeviceClass", DRIVER, spec=spec)


def _pod(name: str, node: str, claim: str = "") -> Json:
    """One with as much to say as a real one."""
    container: Json = {
        "name": "main",
        "image": "registry.example.com/team/image:1",
        "env": [{"name": f"VARIABLE_{n}", "value": "x" * 20} for n in range(10)],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/config"}],
    }
    volumes = [{"name": "config", "configMap": {"name": "config"}}]
    spec: Json = {"nodeName": node, "containers": [container], "volumes": volumes}
    if claim:
        spec["resourceClaims"] = [{"name": "npu", "resourceClaimName": claim}]
    began = "2026-01-01T00:00:00Z"
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": began}
        for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    state = {
        "name": "main",
        "image": container["image"],
        "imageID": "sha256:" + "0" * 64,
        "containerID": "containerd://" + "0" * 64,
        "ready": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": began}},
    }
    status = {
        "phase": "Running",
        "startTime": began,
        "conditions": conditions,
        "containerStatuses": [state],
    }
    return _thing("Pod", name, spec=spec, status=status)


def _waiting() -> Iterator[Json]:
    """A Pod whose claim no device can meet, so that each is asked."""
    selector = f'device.attributes["{DRIVER}"].cores == 16'
    yield _thing("ResourceClaim", "waits", spec=_request(selector))
    spec = {
        "containers": [{"name": "main", "image": "localhost/pause:1"}],
        "resourceClaims": [{"name": "npu", "resourceClaimName": "waits"}],
    }
    yield _thing("Pod", "waits", spec=spec)
