"""A second DRA driver, as small as one can be, in no part the agent's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from betterproto import Message

from npu_agent.kubelet.wire import pluginregistration as registration
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from tests.e2e.dra.claims import API
from tests.e2e.node import Node

SECOND = "second.example.com"
ENDPOINT = f"/var/lib/kubelet/plugins/{SECOND}/dra.sock"
"""As the kubelet sees it."""
VARIABLE = "SECOND"
"""What a container gets: the name of its device."""


def offer(node: Node) -> list[dict[str, Any]]:
    """The driver's DeviceClass, and a slice with two devices on this node."""
    expression = f'device.driver == "{SECOND}"'
    return [
        {
            "apiVersion": API,
            "kind": "DeviceClass",
            "metadata": {"name": SECOND},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        },
        {
            "apiVersion": API,
            "kind": "ResourceSlice",
            "metadata": {"name": f"{SECOND}-{node.name}"},
            "spec": {
                "driver": SECOND,
                "nodeName": node.name,
                "pool": {"name": node.name, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "a"}, {"name": "b"}],
            },
        },
    ]


@contextmanager
def second_driver(node: Node) -> Iterator[list[str]]:
    """Runs it; yields the UIDs of the claims that it has prepared and not unprepared."""
    held: list[str] = []

    def prepare(request: v1.NodePrepareResourcesRequest) -> v1.NodePrepareResourcesResponse:
        return v1.NodePrepareResourcesResponse({one.uid: prepared(one) for one in request.claims})

    def prepared(ref: v1.Claim) -> v1.NodePrepareResourceResponse:
        claim = node.cluster.get("resourceclaim", ref.name, ref.namespace)
        results = claim["status"]["allocation"]["devices"]["results"]
        (ours,) = [one for one in results if one["driver"] == SECOND]
        device = {"name": ref.uid, "containerEdits": {"env": [f"{VARIABLE}={ours['device']}"]}}
        spec = {"cdiVersion": "0.5.0", "kind": f"{SECOND}/claim", "devices": [device]}
        (node.cluster.run_dir / "cdi" / f"{SECOND}-{ref.uid}.json").write_text(json.dumps(spec))
        held.append(ref.uid)
        return v1.NodePrepareResourceResponse(
            [
                v1.Device(
                    request_names=[ours["request"]],
                    pool_name=ours["pool"],
                    device_name=ours["device"],
                    cdi_device_ids=[f"{SECOND}/claim={ref.uid}"],
                )
            ]
        )

    def unprepare(request: v1.NodeUnprepareResourcesRequest) -> v1.NodeUnprepareResourcesResponse:
        for one in request.claims:
            held[:] = [uid for uid in held if uid != one.uid]
            spec = node.cluster.run_dir / "cdi" / f"{SECOND}-{one.uid}.json"
            spec.unlink(missing_ok=True)
        nothing = v1.NodeUnprepareResourceResponse
        return v1.NodeUnprepareResourcesResponse({one.uid: nothing() for one in request.claims})

    info = registration.PluginInfo(
        type="DRAPlugin", name=SECOND, endpoint=ENDPOINT, supported_versions=["v1.DRAPlugin"]
    )
    done = registration.RegistrationStatusResponse
    plugin = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
    register = "pluginregistration.Registration"
    directory = node.cluster.kubelet_dir / "plugins" / SECOND
    directory.mkdir(parents=True, exist_ok=True)
    registry = node.cluster.kubelet_dir / "plugins_registry" / f"{SECOND}-reg.sock"
    services = [
        (
            directory / "dra.sock",
            plugin,
            {
                "NodePrepareResources": _unary(v1.NodePrepareResourcesRequest, prepare),
                "NodeUnprepareResources": _unary(v1.NodeUnprepareResourcesRequest, unprepare),
            },
        ),
        (
            registry,
            register,
            {
                "GetInfo": _unary(registration.InfoRequest, lambda _: info),
                "NotifyRegistrationStatus": _unary(
                    registration.RegistrationStatus, lambda _: done()
                ),
            },
        ),
    ]
    servers = []
    for path, name, methods in services:
        server = grpc.server(ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, methods)])
        server.add_insecure_port(f"unix:{path}")
        server.start()
        servers.append(server)
    try:
        yield held
    finally:
        registry.unlink(missing_ok=True)  # which is what deregisters it
        for server in servers:
            server.stop(None).wait(5)


def _unary(request: type[Message], answer: Callable[[Any], Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        lambda asked, _: answer(asked),
        request_deserializer=lambda data: request().parse(data),
        response_serializer=bytes,
    )
