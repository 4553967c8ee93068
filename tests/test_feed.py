import asyncio

import pytest

from npu_agent.feed import ClosedError, Feed, changes_of


async def collect(feed: Feed[int], into: list[int]) -> None:
    async with asyncio.timeout(30):
        async for value in feed.watch():
            into.append(value)  # noqa: PERF401 (seen while it goes on)


async def turns(count: int = 5) -> None:
    """Lets every task that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_reader_gets_the_value_of_now_and_each_newer_one() -> None:
    feed = Feed(1)
    found: list[int] = []
    reader = asyncio.create_task(collect(feed, found))
    for value in (2, 3):
        await turns()
        feed.publish(value)
    await turns()
    feed.close()
    await reader
    assert found == [1, 2, 3]


async def test_a_slow_reader_skips_to_the_latest() -> None:
    feed = Feed(0)
    watch = feed.watch()
    assert await anext(watch) == 0
    for value in range(1, 100):
        feed.publish(value)
    assert await anext(watch) == 99
    await turns()
    assert feed.value == 99


async def test_a_publish_during_the_readers_work_is_not_missed() -> None:
    feed = Feed(0)
    found = []
    async with asyncio.timeout(30):
        async for value in feed.watch():
            found.append(value)
            if value == 3:
                break
            feed.publish(value + 1)  # before the reader waits again
    assert found == [0, 1, 2, 3]


async def test_an_equal_value_is_no_change() -> None:
    first = (1, 2)
    feed: Feed[tuple[int, ...]] = Feed(first)
    watch = feed.watch()
    assert await anext(watch) is first
    following = asyncio.ensure_future(anext(watch))
    await turns()
    assert feed.publish(tuple([1, 2])) is False  # noqa: C409 (equal, and another object)
    assert feed.value is first
    await turns()
    assert not following.done()
    assert feed.publish((3,)) is True
    assert await following == (3,)


@pytest.mark.parametrize("waiting", [True, False])
async def test_close_ends_every_reader_now_and_later(waiting: bool) -> None:
    feed = Feed(1)
    found: list[int] = []
    reader = asyncio.create_task(collect(feed, found))
    if waiting:
        await turns()
    feed.close()
    async with asyncio.timeout(30):
        await reader
        await collect(feed, found)
    assert found == ([1] if waiting else [])
    assert feed.value == 1


async def test_a_derived_feed_has_what_its_source_has_whenever_it_is_read() -> None:
    feed = Feed((1, "a"))
    number = feed.map(lambda value: value[0])
    doubled = number.map(lambda value: 2 * value)
    assert (number.value, doubled.value) == (1, 2)
    feed.publish((2, "b"))
    feed.publish((3, "c"))  # nobody has read in between
    assert (number.value, doubled.value) == (3, 6)
    feed.publish((1, "a"))
    assert (number.value, doubled.value) == (1, 2)


async def test_readers_of_a_derived_feed_are_woken_only_when_its_value_changes() -> None:
    feed = Feed((1, "a"))
    number = feed.map(lambda value: [value[0]])
    found: list[int] = []

    async def read() -> None:
        async for value in number.watch():
            found.extend(value)

    reader = asyncio.create_task(read())
    await turns()
    first, changed = number.value, number.changed
    feed.publish((1, "b"))
    await turns()
    assert number.value is first
    assert not changed.is_set()
    assert found == [1]
    feed.publish((2, "b"))
    assert changed.is_set()
    await turns()
    assert found == [1, 2]
    feed.publish((3, "b"))
    feed.publish((2, "c"))  # back before the reader ran
    await turns()
    assert found[2:] in ([], [2])  # never the 3 that has gone
    feed.close()
    async with asyncio.timeout(30):
        await reader


async def test_changes_of_derived_feeds_are_seen_even_during_the_readers_work() -> None:
    feed = Feed((1, "a"))
    number, letter = feed.map(lambda value: value[0]), feed.map(lambda value: value[1])
    changes = changes_of(number, letter)
    await anext(changes)
    feed.publish((2, "b"))  # both change: one change
    async with asyncio.timeout(30):
        await anext(changes)
    following = asyncio.ensure_future(anext(changes))
    await turns()
    assert not following.done()
    feed.publish((2, "c"))
    async with asyncio.timeout(30):
        await following


async def test_until_returns_the_first_value_that_meets_the_condition() -> None:
    feed = Feed(0)
    assert await feed.until(lambda value: value == 0) == 0
    waiting = asyncio.create_task(feed.until(lambda value: value > 1))
    await turns()
    feed.publish(1)
    await turns()
    assert not waiting.done()
    feed.publish(2)
    feed.publish(3)  # before it runs again
    async with asyncio.timeout(30):
        assert await waiting == 3


@pytest.mark.parametrize("waiting", [True, False])
async def test_until_of_a_closed_feed_is_an_error(*, waiting: bool) -> None:
    feed = Feed(0)
    if not waiting:
        feed.close()
    until = asyncio.create_task(feed.until(bool))
    await turns()
    feed.close()
    with pytest.raises(ClosedError):
        await until


async def test_a_feed_derived_from_a_closed_one_is_closed() -> None:
    feed = Feed(1)
    early = feed.map(str)
    feed.close()
    assert [value async for value in early.watch()] == []
    assert [value async for value in feed.map(str).watch()] == []
    assert early.value == "1"
