"""Which proxy is used: as kubectl, by its environment."""

import pytest

from npu_agent.kube.proxy import proxy_for

IN_POD = "https://10.96.0.1:443"


@pytest.mark.parametrize(
    ("server", "environment", "expected"),
    [
        (IN_POD, {}, None),
        (IN_POD, {"HTTPS_PROXY": "http://p:3128"}, "http://p:3128"),
        (IN_POD, {"https_proxy": "p:3128"}, "http://p:3128"),
        (IN_POD, {"HTTP_PROXY": "http://p:3128"}, None),
        ("http://10.96.0.1", {"HTTP_PROXY": "http://p:3128"}, "http://p:3128"),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "10.96.0.1"}, None),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "10.96.0.1:443"}, None),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "a, 10.96.0.0/12"}, None),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "10.97.0.0/16,b"}, "http://p"),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "fd00::/8"}, "http://p"),
        (IN_POD, {"HTTPS_PROXY": "http://p", "NO_PROXY": "*"}, None),
        ("https://[fd00::1]:443", {"HTTPS_PROXY": "http://p", "NO_PROXY": "fd00::/8"}, None),
        ("https://api.k8s.local", {"HTTPS_PROXY": "http://p", "NO_PROXY": ".k8s.local"}, None),
        ("https://api.k8s.local", {"HTTPS_PROXY": "http://p", "NO_PROXY": "s.local"}, "http://p"),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://p"}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": "http://p"}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://p"}, None),
        ("https://[1::2:3", {"HTTPS_PROXY": "http://p"}, None),
    ],
)
def test_proxy_for(
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(server) == expected
