"""A good node for each test."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.doctor.helpers import Node, good_node


@pytest_asyncio.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    # Its API server speaks no TLS, and reading the system's authorities takes 0.2 s each time.
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)
    async with good_node(monkeypatch) as made:
        yield made
