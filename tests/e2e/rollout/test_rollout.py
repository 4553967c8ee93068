"""Pods are created all through a rollout of the agent, and none of them notices it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.e2e.api import ADMIN
from tests.e2e.dra.claims import running
from tests.e2e.manifests import Thing, npu_pod, small
from tests.e2e.node import SOON, Node

EACH = 0.2
"""Seconds between two Pods."""
TRIED_AGAIN = 120.0
"""Seconds in which a kubelet with default settings comes back to a claim that it could not prepare:
at its syncFrequency of a minute, and up to half of that later."""
PODS = "/api/v1/namespaces/default/pods"


MAKE: dict[str, Callable[[str], Thing]] = {"device plugin": npu_pod, "DRA": small}


class Stream:
    """Creates Pods, and deletes each when it runs."""

    def __init__(self, node: Node, api: str) -> None:
        self.took: dict[str, float] = {}
        """Seconds from its creation until it was seen to run, by name."""
        self._node = node
        self._api = api
        self._made: dict[str, float] = {}

    def create(self, name: str) -> None:
        """Creates a Pod."""
        pod = MAKE[self._api](name)
        # Not 0: that is a deletion by force, whose containers the next Pod on the card waits for.
        pod["spec"]["terminationGracePeriodSeconds"] = 1
        made = self._node.cluster.request("POST", PODS, pod, token=ADMIN)
        assert made.status == 201, made
        self._made[name] = time.monotonic()

    def look(self) -> None:
        """Notes which Pods run by now, and deletes them."""
        for pod in self._node.objects("pod", "default"):
            name, status = pod["metadata"]["name"], pod["status"]
            if name in self.took:
                continue  # killed, and so Failed, until the kubelet has taken it away
            assert status["phase"] != "Failed", (name, status)
            if status["phase"] == "Running" and name in self._made:
                self.took[name] = time.monotonic() - self._made[name]
                self._node.cluster.request("DELETE", f"{PODS}/{name}", token=ADMIN)

    def run(self, count: int) -> None:
        """Creates so many Pods and waits until each has run."""
        with ThreadPoolExecutor(1) as executor:
            creating = executor.submit(self._create_all, count)
            until = time.monotonic() + count * EACH + TRIED_AGAIN
            while len(self.took) < count:
                assert time.monotonic() < until, self._made.keys() - self.took.keys()
                self.look()
                if creating.done():
                    creating.result()
                time.sleep(0.1)

    def _create_all(self, count: int) -> None:
        began = time.monotonic()
        for at in range(count):
            self.create(f"{self._api.replace(' ', '-').lower()}-{at}")
            time.sleep(max(0.0, began + (at + 1) * EACH - time.monotonic()))

    def summary(self) -> str:
        """What was measured."""
        took = sorted(self.took.values())
        return (
            f"{self._api}: {len(took)} Pods ran after {statistics.median(took):.2f} s (median), "
            f"the last ones after {', '.join(f'{each:.2f}' for each in took[-4:])} s"
        )


def warnings(node: Node) -> list[str]:
    """The Warning Events of Pods: reason and message."""
    events = node.objects("event", "default", fieldSelector="type=Warning")
    return [
        f"{one['reason']}: {one['involvedObject']['name']}: {one['message']}"
        for one in events
        if one["involvedObject"]["kind"] == "Pod" and one["reason"] in REFUSED
    ]


REFUSED = ("FailedPrepareDynamicResources", "UnexpectedAdmissionError")


@contextmanager
def rollouts(node: Node) -> Iterator[None]:
    """Rolls the agent over, repeatedly while the context is open, once at least."""
    over = threading.Event()

    def roll() -> int:
        done = 0
        while not over.is_set() or not done:
            node.restart()
            done += 1
        return done

    with ThreadPoolExecutor(1) as executor:
        rolling = executor.submit(roll)
        try:
            yield
        finally:
            over.set()
            print(f"{rolling.result()} rollouts")


@pytest.mark.parametrize("api", list(MAKE))
def test_no_pod_notices_a_rollout(node: Node, api: str) -> None:
    Stream(node, api).run(3)  # so that all is warm
    node.delete_pods()
    stream = Stream(node, api)
    with rollouts(node):
        stream.run(20)
    print(stream.summary())
    assert warnings(node) == []


def test_a_claim_that_found_no_agent_is_prepared_when_its_pod_changes(node: Node) -> None:
    """The remedy of docs/dra.md: else a kubelet comes back to it at its syncFrequency."""
    with node.without_agent():
        node.apply(small("early"))
        node.wait_for("the claim to be refused", lambda: warnings(node))
    node.wait_for("an agent that is ready", node.agent_ready, 2 * SOON)
    node.kubectl("annotate", "pod", "early", "again=1")
    running(node, "early")
