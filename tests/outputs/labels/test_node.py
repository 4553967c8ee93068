"""Labels on one Node: what is written and what is left, against a Node kept in memory.

The rules of server-side apply are the API server's; the same is seen on a real one in tests/e2e.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from npu_agent.kube import FIELD_MANAGER, Api, ApiError, Kind, NodeMeta
from npu_agent.kube.client import Request
from npu_agent.outputs.labels.labeller import UnavailableError
from npu_agent.outputs.labels.node import NodeOutput

WANTED = {"beta.furiosa.ai/npu.count": "2", "beta.furiosa.ai/npu.family": "warboy"}


@dataclass
class Server(Api):
    """Answers as the API server would, with one Node and server-side apply's rules for labels."""

    now: NodeMeta = field(
        default_factory=lambda: NodeMeta(
            name="n1", uid="u1", resource_version="1", labels={}, applied=frozenset()
        )
    )
    seen: NodeMeta | None = None
    """What the cache still has; None: what is."""
    gets: int = 0
    writes: int = 0
    refusal: ApiError | None = None
    lost: ApiError | None = None
    """In place of the answer to a write that was done."""
    webhook: dict[str, str] = field(default_factory=dict)

    async def ask(self, request: Request) -> dict[str, Any]:
        assert request.path == "/api/v1/nodes/n1"
        self.gets += request.method == "GET"
        if self.refusal:
            raise self.refusal
        if request.method == "GET":
            return answer(self.seen or self.now)
        assert request.body
        metadata = request.body["metadata"]
        labels = metadata.get("labels", {})
        if metadata["uid"] != self.now.uid:
            raise ApiError("another uid", kind=Kind.CONFLICT, status=409)
        kept = {k: v for k, v in self.now.labels.items() if k not in self.now.applied - set(labels)}
        after = replace(
            self.now, labels={**kept, **labels, **self.webhook}, applied=frozenset(labels)
        )
        self.writes += after != self.now
        self.now = after
        if self.lost:
            raise self.lost
        return answer(after)

    def by_hand(self, **labels: str) -> None:
        """Somebody else sets labels, and so takes them over."""
        names = {f"beta.furiosa.ai/npu.{name}": value for name, value in labels.items()}
        self.now = replace(
            self.now, labels={**self.now.labels, **names}, applied=self.now.applied - set(names)
        )


def answer(node: NodeMeta) -> dict[str, Any]:
    """The Node as the API server answers it."""
    applied: dict[str, Any] = {f"f:{key}": {} for key in node.applied}
    ours = {
        "manager": FIELD_MANAGER,
        "operation": "Apply",
        "fieldsV1": {"f:metadata": {"f:labels": applied}},
    }
    metadata = {
        "name": node.name,
        "uid": node.uid,
        "resourceVersion": node.resource_version,
        "labels": dict(node.labels),
        "managedFields": [ours],
    }
    return {"kind": "PartialObjectMetadata", "metadata": metadata}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def output(server: Server) -> NodeOutput:
    return NodeOutput(server, "n1")


async def test_labels_are_written_once(server: Server, output: NodeOutput) -> None:
    assert await output.put(WANTED, careful=False) == Counter(written=2)
    assert server.now.labels == WANTED
    for _ in range(3):
        assert not (await output.put(WANTED, careful=False)).total()
    assert (server.writes, server.gets) == (1, 4)


async def test_a_new_agent_finds_them_and_writes_nothing(server: Server) -> None:
    await NodeOutput(server, "n1").put(WANTED, careful=False)
    assert not (await NodeOutput(server, "n1").put(WANTED, careful=False)).total()
    assert server.writes == 1


async def test_what_the_agent_before_put_and_no_longer_applies_goes(server: Server) -> None:
    old = {**WANTED, "alpha.furiosa.ai/npu.family": "warboy"}
    await NodeOutput(server, "n1").put(old, careful=False)
    server.now = replace(server.now, labels={**server.now.labels, "example.com/rack": "a7"})
    done = await NodeOutput(server, "n1").put(WANTED, careful=False)
    assert done == Counter(removed=1, written=0)
    assert server.now.labels == {**WANTED, "example.com/rack": "a7"}


async def test_drift_is_put_back(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.by_hand(count="7")
    assert await output.put(WANTED, careful=False) == Counter(put_back=1, removed=0)
    assert server.now.labels == WANTED
    assert server.now.applied == set(WANTED)


async def test_the_right_value_in_other_hands_becomes_ours(
    server: Server, output: NodeOutput
) -> None:
    server.by_hand(count="2")
    assert await output.put(WANTED, careful=False) == Counter(written=2, removed=0)
    assert server.now.applied == set(WANTED)


async def test_a_stale_cache_does_not_hide_a_change(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    before = server.now
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    output.changed()
    await output.put(less, careful=False)
    server.seen = before  # the cache still shows what is now wanted again
    output.changed()
    assert (await output.put(WANTED, careful=False))["written"] == 1
    assert server.now.labels == WANTED


@pytest.mark.parametrize("status", [None, 504])
async def test_a_write_whose_answer_was_lost_is_followed_by_another(
    server: Server, output: NodeOutput, status: int | None
) -> None:
    await output.put(WANTED, careful=False)
    server.lost = ApiError("no answer", kind=Kind.TIMEOUT, status=status)
    output.changed()
    with pytest.raises(UnavailableError, match="no answer"):
        await output.put({**WANTED, "beta.furiosa.ai/npu.count": "1"}, careful=False)
    server.lost = None
    assert server.now.labels != WANTED
    # The last answer, and perhaps the cache, show what is now wanted again.
    output.changed()
    assert await output.put(WANTED, careful=False) == Counter(written=2, removed=0)
    assert server.now.labels == WANTED
    assert not (await output.put(WANTED, careful=False)).total()


async def test_after_a_refusal_what_is_in_place_is_not_written_again(
    server: Server, output: NodeOutput
) -> None:
    await output.put(WANTED, careful=False)
    server.refusal = ApiError("no right to", kind=Kind.FORBIDDEN, status=403)
    output.changed()
    with pytest.raises(UnavailableError, match="no right to"):
        await output.put({**WANTED, "beta.furiosa.ai/npu.count": "1"}, careful=False)
    output.changed()
    assert not (await output.put(WANTED, careful=False)).total()


async def test_a_refusal_leaves_an_earlier_write_in_doubt(
    server: Server, output: NodeOutput
) -> None:
    await output.put(WANTED, careful=False)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    server.lost = ApiError("no answer", kind=Kind.TIMEOUT)
    output.changed()
    with pytest.raises(UnavailableError, match="no answer"):
        await output.put(less, careful=False)
    server.refusal = ApiError("slow down", kind=Kind.TOO_MANY, status=429)
    with pytest.raises(UnavailableError, match="slow down"):
        await output.put(less, careful=False)
    server.lost = server.refusal = None
    output.changed()
    await output.put(WANTED, careful=False)
    assert server.now.labels == WANTED


async def test_careful_leaves_what_is_there(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    output.changed()
    assert await output.put(less, careful=True) == Counter(left=1)
    assert server.now.labels == WANTED
    output.changed()
    assert (await output.put(less, careful=False))["written"] == 1


async def test_careful_puts_labels_where_there_are_none(output: NodeOutput) -> None:
    assert await output.put(WANTED, careful=True) == Counter(written=2, removed=0)


async def test_a_node_that_was_made_anew_is_read_again(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.now = replace(server.now, uid="u2", labels={}, applied=frozenset())
    output.changed()
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    with pytest.raises(UnavailableError, match="another uid") as refused:
        await output.put(less, careful=False)
    assert refused.value.kind == "conflict"
    await output.put(less, careful=False)
    assert server.now.labels == less


async def test_an_error_of_the_api_server_keeps_its_words_and_its_wait(
    server: Server, output: NodeOutput
) -> None:
    server.refusal = ApiError("slow down", kind=Kind.TOO_MANY, status=429, retry_after=7.0)
    with pytest.raises(UnavailableError, match="slow down") as refused:
        await output.put(WANTED, careful=False)
    assert (refused.value.kind, refused.value.retry_after) == ("too_many", 7.0)


async def test_a_webhook_that_changes_labels_is_told(server: Server, output: NodeOutput) -> None:
    server.webhook = {"beta.furiosa.ai/npu.count": "0"}
    with pytest.raises(UnavailableError, match=r"beta\.furiosa\.ai/npu\.count differ"):
        await output.put(WANTED, careful=False)


async def test_without_a_node_name_it_says_what_to_set(server: Server) -> None:
    output = NodeOutput(server, None)
    with pytest.raises(UnavailableError, match="NODE_NAME is not set") as refused:
        await output.put(WANTED, careful=False)
    assert refused.value.retry_after == 3600
    assert server.gets == 0


async def test_clear_takes_exactly_ours(server: Server, output: NodeOutput) -> None:
    await output.put(WANTED, careful=False)
    server.now = replace(server.now, labels={**server.now.labels, "example.com/rack": "a7"})
    assert await output.clear() == set(WANTED)
    assert server.now.labels == {"example.com/rack": "a7"}
    assert await output.clear() == frozenset()
