"""How the pages' readers decide how often cards are read."""

from __future__ import annotations

import asyncio

import pytest

from npu_agent.outputs.web import readers
from npu_agent.outputs.web.readers import UNREAD_INTERVAL, Readers
from tests.until import until


async def test_without_requests_readers_are_away_and_the_next_request_brings_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readers, "_REMEMBERED", 0.05)
    pages = Readers()
    running = asyncio.create_task(pages.run())
    try:
        assert pages.interval(5.0) == UNREAD_INTERVAL
        pages.touch()
        assert pages.present.value
        # The reading that it finds is from the time before.
        assert pages.interval(5.0) == UNREAD_INTERVAL
        await pages.present.until(lambda present: not present)
    finally:
        running.cancel()


async def test_while_pages_are_read_the_interval_is_the_config_s() -> None:
    pages = Readers()
    pages.touch()
    await until(lambda: pages.interval(0.05) == 0.05)
    assert pages.interval(3600.0) == 3600.0  # never more often than the config has it
