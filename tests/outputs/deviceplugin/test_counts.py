"""What is counted of a resource's plugin; the calls themselves are in test_service."""

import asyncio

from npu_agent.core.counts import RESULTS, Counts, Histogram
from npu_agent.feed import Feed
from npu_agent.kubelet.ownership import Ownership
from npu_agent.outputs.deviceplugin.service import Devices
from npu_agent.outputs.deviceplugin.session import Session, Timing
from npu_agent.simulator.kubelet import StandInKubelet
from tests.outputs.deviceplugin.client import DEADLINE
from tests.outputs.deviceplugin.helpers import devices, short_directory, state
from tests.until import until

RESOURCE = "beta.furiosa.ai/npu"


def test_a_number_counts_at_the_first_bound_that_it_does_not_pass() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.add(number)
    assert histogram.counts == [2, 2, 2]
    assert histogram.total == 107.0


def test_two_histograms_share_nothing() -> None:
    one, two = Counts(), Counts()
    one.allocated("granted", 0.001)
    assert one.allocations["granted"] == 1
    assert sum(one.allocation_seconds.counts) == 1
    assert two.allocations == dict.fromkeys(RESULTS, 0)
    assert not sum(two.allocation_seconds.counts)


async def test_a_kubelet_that_comes_back_is_counted_and_the_first_one_is_not() -> None:
    # A pause that is long enough for the stand-in to put the old stream away.
    timing = Timing(retry_first=0.3, fickle_longest=0.3)
    cards: Feed[Devices] = Feed(devices(state()))
    with short_directory() as temporary:
        directory = temporary / "plugins"
        directory.mkdir()
        kubelet = StandInKubelet(directory)
        await kubelet.start()
        one = Session(
            resource=RESOURCE,
            devices=cards,
            directory=directory,
            socket_name="npu",
            ownership=Ownership(directory),
            timing=timing,
        )
        running = asyncio.create_task(one.run())

        await until(lambda: one.status.value.registrations == 1)
        assert one.counts.returns == 0
        for times in (1, 2):
            await kubelet.until(RESOURCE, lambda p: p.connected and p.messages > 0, DEADLINE)
            kubelet.hang_up(RESOURCE)
            await until(lambda times=times: one.counts.returns == times)  # type: ignore[misc]
            assert one.status.value.registrations == times + 1
        await kubelet.until(RESOURCE, lambda p: p.connected and p.messages > 0, DEADLINE)
        await until(lambda: one.counts.messages == 3)  # it is counted just after it has gone
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await kubelet.stop()
