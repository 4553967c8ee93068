"""A good node for each test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from npu_agent.kube import credentials
from tests.people.doctor.helpers import NODE_NAME, Node, good_node


@pytest_asyncio.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    # Its API server speaks no TLS, and reading the system's authorities takes 0.2 s each time.
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)
    async with good_node(monkeypatch) as made:
        yield made


@pytest.fixture
def bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The good node, where the token is that of a Pod."""

    load = credentials.load
    monkeypatch.setattr(credentials, "load", lambda: replace(load(), node=NODE_NAME))
    return node
