"""Attacks by Pods that pod-resources does not list, while they have a card or are about to."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from uuid import uuid4

from grpclib.exceptions import GRPCError

from bench.process import RESOURCE
from npu_agent.kubelet.pods import CHECKPOINT
from npu_agent.kubelet.record import RECORD
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1 as pods
from tests.chaos.table import attack
from tests.chaos.world import World, cores
from tests.outputs.helpers import DRIVER

NAMESPACE = "team"


class Pod:
    """A Pod's cgroup and its note in the kubelet's checkpoint, on the simulated host."""

    def __init__(self, here: World, uid: str = "") -> None:
        self.uid = uid or str(uuid4())
        self._here = here
        cgroups = here.root / "sys/fs/cgroup"
        self._cgroup = cgroups / f"kubepods/pod{self.uid}"
        self._cgroup.mkdir(parents=True)
        (cgroups / "cgroup.controllers").touch()
        self.runs(False)

    def runs(self, populated: bool = True) -> None:
        """It has a process from now on, or none."""
        (self._cgroup / "cgroup.events").write_text(
            f"populated {populated:d}\nfrozen 0\n", encoding="utf-8"
        )

    def is_noted(self, ids: Sequence[str]) -> None:
        """The kubelet has given it these devices."""
        note(self._here, {self.uid: ids})

    def ends(self) -> None:
        """The kubelet removes its cgroup, and forgets its note when it allocates again."""
        shutil.rmtree(self._cgroup)
        (self._here.plugins / CHECKPOINT).unlink(missing_ok=True)


def note(here: World, devices: Mapping[str, Sequence[str]]) -> None:
    """The kubelet's checkpoint has these devices of the Pods with these UIDs, and no others."""
    entries = [
        {"PodUID": uid, "ResourceName": RESOURCE, "DeviceIDs": {"0": [*ids]}}
        for uid, ids in devices.items()
    ]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {}}
    checkpoint = here.plugins / CHECKPOINT
    checkpoint.write_text(json.dumps({"Data": data, "Checksum": 1}), encoding="utf-8")


@attack(short=True)
async def init_container_waits_for_its_volume(here: World) -> None:
    """An init container waits for a volume while the agent restarts, and cuts the cards in cores.

    Its cores are handed out to no other container.
    """
    grant = await here.granted("waits")
    here.kubelet.release(RESOURCE, grant.ids)  # pod-resources lists no init containers
    pod = Pod(here)
    pod.is_noted(grant.ids)
    here.configure("defaultPe: Single")
    await here.start_again()
    await here.healthy(2)
    await asyncio.sleep(5)  # two answers without it ended an allocation
    others = [await here.granted(f"other-{number}") for number in range(2)]
    assert not set().union(*map(cores, others)) & cores(grant), "handed out twice"
    await here.healthy(2)
    pod.ends()
    await here.healthy(4)
    here.kubelet.taken.clear()
    here.configure("")


@attack(short=True)
async def config_changes_while_an_allocate_waits(here: World) -> None:
    """The card of a Pod that runs on is asked for; meanwhile it is disabled, or cut in cores.

    Refused, once that Pod has ended.
    """
    for change in ("disabledDevices: [{devName: npu0}]", "defaultPe: Single"):
        grant = await here.granted("old")
        pod = Pod(here)
        pod.is_noted(grant.ids)
        pod.runs()
        await until_recorded(here, pod.uid)
        here.kubelet.release(RESOURCE, grant.ids)
        end = len(here.said())
        asking = asyncio.create_task(here.kubelet.allocate_ids(RESOURCE, grant.ids))
        await here.logged("cores withheld", end)
        here.configure(change)
        await here.until(partial(unlisted, here, grant.ids), "another list")
        pod.ends()
        try:
            raise AssertionError(f"handed out: {await asking}")
        except GRPCError as error:
            refusal = str(error.message)
        assert "is no longer listed" in refusal, refusal
        here.configure("")
        await here.well()


def unlisted(here: World, ids: Sequence[str]) -> bool:
    devices = here.kubelet.plugins.value[RESOURCE].devices
    return not {device for device, _ in devices}.intersection(ids)


async def until_recorded(here: World, uid: str) -> None:
    """Waits until the agent's record has a Pod."""
    record = here.plugins / RECORD
    await here.until(
        lambda: uid in record.read_text(encoding="utf-8"), f"the Pod {uid} to be in the record"
    )


class Lister(pods.PodResourcesListerBase):
    """Lists Pods with a device of a claim."""

    def __init__(self) -> None:
        self.users: dict[str, tuple[str, str]] = {}
        """By Pod, the claim and its device."""
        self.calls = 0

    async def list(
        self,
        list_pod_resources_request: pods.ListPodResourcesRequest,  # noqa: ARG002 (it is empty)
    ) -> pods.ListPodResourcesResponse:
        self.calls += 1
        return pods.ListPodResourcesResponse(
            pod_resources=[
                pods.PodResources(
                    name=pod,
                    namespace=NAMESPACE,
                    containers=[
                        pods.ContainerResources(
                            name="main",
                            dynamic_resources=[
                                pods.DynamicResource(
                                    claim_name=claim,
                                    claim_namespace=NAMESPACE,
                                    claim_resources=[
                                        pods.ClaimResource(driver_name=DRIVER, device_name=device)
                                    ],
                                )
                            ],
                        )
                    ],
                )
                for pod, (claim, device) in self.users.items()
            ]
        )


@asynccontextmanager
async def claims_served(here: World) -> AsyncIterator[Lister]:
    """The node offers its cards by DRA meanwhile, and pod-resources lists what a test says."""
    lister, kubelet = Lister(), here.kubelet
    path = here.plugins.parent / "pod-resources" / "kubelet.sock"
    assert kubelet.lister
    await kubelet.lister.shutdown()
    kubelet.lister = UnixServer([lister], path)
    await kubelet.lister.listen()
    await here.agent.manager.start()
    here.configure("allocation: {api: dra}")
    await here.start_again()
    await here.until(lambda: len(free(here)) == here.devices, "all cards to be in a slice")
    yield lister
    await kubelet.lister.shutdown()
    kubelet.lister = None
    here.configure("")
    await here.start_again()
    await here.restart_kubelet()


def free(here: World) -> list[str]:
    """The devices in slices, without those that have a taint."""
    tainted = here.agent.node.taints()
    return [device for device in here.agent.node.devices() if device not in tainted]


@attack(short=True)
async def pod_joins_a_claim(here: World) -> None:
    """A Pod comes to share a claim, all its Pods are deleted by force, and that one runs on.

    Another claim gets the card when it has ended.
    """
    async with claims_served(here) as lister:
        node, manager = here.agent.node, here.agent.manager
        device = free(here)[0]
        ref = node.allocate(DRIVER, "shared", [device], pod="first", namespace=NAMESPACE)
        await manager.prepare(DRIVER, ref)
        lister.users["first"] = ("shared", device)
        pod = Pod(here)
        pod.runs()
        joins = {"resource": "pods", "name": "later", "uid": pod.uid}
        node.claims(NAMESPACE)["shared"]["status"]["reservedFor"].append(joins)
        lister.users["later"] = ("shared", device)
        calls = lister.calls
        await here.until(lambda: lister.calls >= calls + 2, "two answers that list it")
        lister.users.clear()
        node.forget(ref)
        await manager.unprepare(DRIVER, ref)
        await here.logged("cores withheld")
        other = node.allocate(DRIVER, "other", [device], pod="other", namespace=NAMESPACE)
        preparing = asyncio.create_task(manager.prepare(DRIVER, other))
        done, _ = await asyncio.wait([preparing], timeout=5)
        assert not done, "prepared while another Pod has the card"
        pod.ends()
        await preparing
        await manager.unprepare(DRIVER, other)
