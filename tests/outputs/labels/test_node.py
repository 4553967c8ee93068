"""Labels on one Node: what is written and what is left, against a Node kept in memory.

The rules of server-side apply are the API server's; the same is seen on a real one in tests/e2e.
"""

import copy
from collections import Counter
from typing import Any

import pytest

from npu_agent.kube import ApiError, ErrorKind
from npu_agent.outputs.labels.labeller import OutputError
from npu_agent.outputs.labels.node import NodeOutput
from npu_agent.people.simulator.apiserver import NODES
from tests.kube.apiserver import FaultyApiServer, applied, own
from tests.outputs.helpers import DirectApi

WANTED = {"beta.furiosa.ai/npu.count": "2", "beta.furiosa.ai/npu.family": "warboy"}


class Server(DirectApi):
    """Has one Node."""

    def __init__(self) -> None:
        super().__init__(FaultyApiServer("n1"))

    @property
    def node(self) -> dict[str, Any]:
        return self.server.objects[NODES]["n1"]

    @property
    def labels(self) -> dict[str, str]:
        """But for the one that the kubelet sets."""
        (_, *found) = self.node["metadata"]["labels"].items()
        return dict(found)

    @property
    def applied(self) -> frozenset[str]:
        return applied(self.node)

    def by_hand(self, **labels: str) -> None:
        """Another client sets labels, and so takes them over."""
        names = {f"beta.furiosa.ai/npu.{name}": value for name, value in labels.items()}
        meta = self.node["metadata"]
        meta["managedFields"] = own(self.applied - names.keys())
        meta["labels"].update(names)

    def refuse(self, *error: Any, **more: Any) -> None:
        self.refused = lambda _: ApiError(*error, **more)

    def lose(self, error: ApiError) -> None:
        """Its answers to writes are lost, and only those."""

        def lost(_: dict[str, Any]) -> None:
            if self.server.calls[-1] == "apply":
                raise error

        self.after = lost

    def recover(self) -> None:
        self.refused, self.after = lambda _: None, lambda _: None


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def output(server: Server) -> NodeOutput:
    return NodeOutput(server, "n1")


async def test_labels_are_written_once(server: Server, output: NodeOutput) -> None:
    assert await output.put(WANTED, careful=False) == Counter(written=2)
    assert server.labels == WANTED
    for next_output in (output, output, NodeOutput(server, "n1")):  # a new agent's, too
        assert not (await next_output.put(WANTED, careful=False)).total()
    assert server.server.calls == ["get", "apply", "get", "get", "get"]


async def test_what_the_agent_before_put_and_no_longer_applies_goes(server: Server) -> None:
    old = {**WANTED, "alpha.furiosa.ai/npu.family": "warboy"}
    await NodeOutput(server, "n1").put(old, careful=False)
    server.node["metadata"]["labels"]["example.com/rack"] = "a7"
    done = await NodeOutput(server, "n1").put(WANTED, careful=False)
    assert done == Counter(removed=1, written=0)
    assert server.labels == {**WANTED, "example.com/rack": "a7"}


async def test_drift_is_put_back(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.by_hand(count="7")
    assert await output.put(WANTED, careful=False) == Counter(put_back=1, removed=0)
    assert server.labels == WANTED
    assert server.applied == set(WANTED)


async def test_the_right_value_in_other_hands_becomes_ours(
    server: Server, output: NodeOutput
) -> None:
    server.by_hand(count="2")
    assert await output.put(WANTED, careful=False) == Counter(written=2, removed=0)
    assert server.applied == set(WANTED)


async def test_a_stale_cache_does_not_hide_a_change(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    before = copy.deepcopy(server.node)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    await output.put(less, careful=False)
    # The cache still shows what is now wanted again.
    server.after = lambda found: server.server.calls[-1] == "get" and found.update(before)
    assert (await output.put(WANTED, careful=False))["written"] == 1
    assert server.labels == WANTED


async def test_a_write_whose_answer_was_lost_is_followed_by_another(
    server: Server, output: NodeOutput
) -> None:
    await output.put(WANTED, careful=False)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    server.lose(ApiError("no answer", kind=ErrorKind.TIMEOUT))
    with pytest.raises(OutputError, match="no answer"):
        await output.put(less, careful=False)
    assert server.labels == less
    server.refuse("slow down", kind=ErrorKind.TOO_MANY, status=429)
    with pytest.raises(OutputError, match="slow down"):
        await output.put(less, careful=False)
    server.recover()
    # The last answer, and perhaps the cache, show what is now wanted again.
    await output.put(WANTED, careful=False)
    assert server.labels == WANTED
    assert not (await output.put(WANTED, careful=False)).total()


async def test_careful_leaves_what_is_there(server: Server, output: NodeOutput) -> None:
    assert await output.put(WANTED, careful=True) == Counter(written=2, removed=0)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    assert await output.put(less, careful=True) == Counter(left=1)
    assert server.labels == WANTED
    assert (await output.put(less, careful=False))["written"] == 1


async def test_a_node_that_was_made_anew_is_read_again(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.server = FaultyApiServer("n1")
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    with pytest.raises(OutputError, match="another object") as refused:
        await output.put(less, careful=False)
    assert refused.value.kind == "conflict"
    await output.put(less, careful=False)
    assert server.labels == less


async def test_an_error_of_the_api_server_keeps_its_words_and_its_wait(
    server: Server, output: NodeOutput
) -> None:
    server.refuse("slow down", kind=ErrorKind.TOO_MANY, status=429, retry_after=7.0)
    with pytest.raises(OutputError, match="slow down") as refused:
        await output.put(WANTED, careful=False)
    assert (refused.value.kind, refused.value.retry_after) == ("too_many", 7.0)


async def test_a_webhook_that_changes_labels_is_told(server: Server, output: NodeOutput) -> None:
    webhook = {"beta.furiosa.ai/npu.count": "0"}
    server.after = lambda found: found["metadata"]["labels"].update(webhook)
    with pytest.raises(OutputError, match=r"beta\.furiosa\.ai/npu\.count differ"):
        await output.put(WANTED, careful=False)


async def test_without_a_node_name_it_says_what_to_set(server: Server) -> None:
    output = NodeOutput(server, None)
    with pytest.raises(OutputError, match="NODE_NAME is not set") as refused:
        await output.put(WANTED, careful=False)
    assert refused.value.retry_after == 3600
    assert server.server.calls == []


async def test_clear_takes_exactly_ours(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.node["metadata"]["labels"]["example.com/rack"] = "a7"
    assert await output.clear() == set(WANTED)
    assert server.labels == {"example.com/rack": "a7"}
    assert await output.clear() == frozenset()
