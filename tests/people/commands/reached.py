"""A stand-in in place of the API server that kubectl leads to, which test_proxy.py is about."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from npu_agent.kube import Api
from npu_agent.kube.credentials import at
from npu_agent.people.cluster.proxy import Login
from npu_agent.people.commands import cordon, kubectl, kubectl_complete, kubectl_verify


def reach(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each command ask the server there."""

    @asynccontextmanager
    async def through_kubectl(*_: object, **__: object) -> AsyncIterator[tuple[Api, Login]]:
        async with Api(lambda: at(url, "a test")) as api:
            yield api, Login(context="here", server="https://10.96.0.1")

    for command in (cordon, kubectl, kubectl_complete, kubectl_verify):
        monkeypatch.setattr(command, "through_kubectl", through_kubectl)
