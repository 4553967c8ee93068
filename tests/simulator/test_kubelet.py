from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError

from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.simulator.kubelet import StandInKubelet


async def test_another_version_is_refused(tmp_path: Path) -> None:
    kubelet = StandInKubelet(tmp_path)
    request = wire.RegisterRequest(version="v2", endpoint="a.sock", resource_name="a.example/b")
    with pytest.raises(GRPCError, match="'v2' is not supported"):
        await kubelet.register(request)
    assert kubelet.calls == 1
    assert not kubelet.plugins.value


async def test_a_plugin_that_cannot_be_dialled_is_refused(tmp_path: Path) -> None:
    kubelet = StandInKubelet(tmp_path)
    request = wire.RegisterRequest(version="v1beta1", endpoint="no.sock", resource_name="a.b/c")
    with pytest.raises(GRPCError, match="failed to dial device plugin"):
        await kubelet.register(request)
    assert not kubelet.plugins.value
