"""What a Pod's environment and its token make of it; calls with both are in test_client."""

from pathlib import Path

import pytest

from npu_agent.kube import serviceaccount


@pytest.mark.parametrize(
    ("host", "server"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")],
)
async def test_the_address_is_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, server: str
) -> None:
    monkeypatch.setattr(serviceaccount, "DIRECTORY", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "token").write_text("secret\n")
    found = await serviceaccount.load()
    assert found
    assert (found.server, found.authorization) == (server, "Bearer secret")
