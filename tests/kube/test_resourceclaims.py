"""Requests about claims and their classes."""

from unittest.mock import AsyncMock

from npu_agent.kube import Api
from npu_agent.kube.resourceclaims import device_class


async def test_a_device_class_is_asked_for_by_its_name() -> None:
    found = {"metadata": {"name": "npu.furiosa.ai"}}
    api = AsyncMock(Api)
    api.ask_apart.return_value = found
    assert await device_class(api, "npu.furiosa.ai") == found
    (request,) = api.ask_apart.await_args.args
    assert request.path == "/apis/resource.k8s.io/v1/deviceclasses/npu.furiosa.ai"
