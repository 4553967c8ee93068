"""Attacks on a node whose config has the Pods of failed cards evicted."""

from __future__ import annotations

import asyncio

from aiohttp import web

from bench.process import RESOURCE
from npu_agent.people.simulator.kubelet import GivenDevices
from tests.chaos.attacks.pods import Pod, note
from tests.chaos.table import attack
from tests.chaos.world import World, cores
from tests.kube.helpers import jwt
from tests.kube.helpers import status as refuses

AFTER = 5
"""Seconds for which a card has to have failed."""
SHORT = 1.0
"""Seconds of a fault that is too short to evict a Pod."""
PODS = "/api/v1/namespaces/default/pods"


class Tenants:
    """Pods on all cards of a node, as its kubelet and the API server have them."""

    def __init__(self, here: World) -> None:
        self.evicted: list[tuple[str, str, str]] = []
        """Of each eviction: the Pod, the UID that it had to have, and as whom the agent asked."""
        self._here = here
        self._grants: dict[str, GivenDevices] = {}
        self._pods: dict[str, Pod] = {}

    async def start(self) -> None:
        """Starts a Pod a card, on a node whose agent may ask as its Node."""
        node = self._here.agent.node
        node.readers.add("node")
        token = jwt({"kubernetes.io": {"node": {"name": node.node}}})
        (node.account / "token").write_text(token, encoding="utf-8")
        node.instead["create"] = self._create
        for number in range(self._here.devices):
            name = f"pod-{number}"
            pod = Pod(self._here)
            pod.runs()
            self._pods[name] = pod
            self._grants[name] = await self._here.granted(name)
            meta = {"namespace": "default", "name": name, "uid": pod.uid}
            node.objects[PODS][name] = {"kind": "Pod", "metadata": meta}
        self._note()

    def on(self, card: int) -> tuple[str, str]:
        """Name and UID of the Pod on a card."""
        for name, grant in self._grants.items():
            if card in {number for number, _ in cores(grant)}:
                return name, self._pods[name].uid
        raise AssertionError(f"no Pod on npu{card}")

    def end(self, *names: str) -> None:
        """Ends Pods, as the kubelet does with one that was evicted; without names all."""
        for name in names or [*self._pods]:
            self._here.kubelet.release(RESOURCE, self._grants.pop(name).ids)
            self._pods.pop(name).ends()
        self._note()

    def _note(self) -> None:
        note(self._here, {self._pods[name].uid: of.ids for name, of in self._grants.items()})

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path.endswith("/eviction"):
            uid = body["deleteOptions"]["preconditions"]["uid"]
            name = body["metadata"]["name"]
            self.evicted.append((name, uid, request.headers["Impersonate-User"]))
            body = {"kind": "Status", "status": "Success"}
        return web.json_response(body, status=201)


@attack(
    short=True,
    cards="warboy=4",
    config=f"health: {{evict: true, evictAfter: {AFTER}}}\n",
)
async def cards_fail_under_pods(here: World) -> None:
    """Cards fail for a second in turn, and the agent is killed, kubelet and API server are away.

    No Pod is evicted. When a card stays dead, its Pod alone is: once, by its UID, as the Node.
    """
    node = here.agent.node
    tenants = Tenants(here)
    await tenants.start()
    await here.start_again()
    await here.well()
    faults = ("dead", "hang", "no-node", "unreadable", "gone", "hot", "errors")
    for number, fault in enumerate(faults):
        card = f"npu{number % 3}"
        await here.fault(card, fault)
        match fault:
            case "dead":
                await here.start_again()
            case "hang":
                node.trouble = refuses(503, "attack")
            case "gone":
                await here.kubelet.stop()
                await here.kubelet.start()
        await asyncio.sleep(SHORT)
        await here.fault(card, "back")
        node.trouble = None
        await here.well()
    assert tenants.evicted == []

    name, uid = tenants.on(3)
    await here.fault("npu3", "dead")
    await here.healthy(3)
    await here.start_again()
    node.trouble = refuses(503, "attack")
    await asyncio.sleep(AFTER + 1)
    node.trouble = None
    await here.until(lambda: tenants.evicted, "an eviction")
    assert tenants.evicted == [(name, uid, f"system:node:{node.node}")]
    tenants.end(name)
    await asyncio.sleep(AFTER)
    assert len(tenants.evicted) == 1, tenants.evicted
    await here.fault("npu3", "ok")
    tenants.end()
