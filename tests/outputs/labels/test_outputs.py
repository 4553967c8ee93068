"""The places where labels go, against a Node kept in memory and a directory.

The rules of server-side apply are the API server's; the same is seen on a real one in tests/e2e.
"""

from __future__ import annotations

import copy
import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from npu_agent import files
from npu_agent.kube import ApiError, ErrorKind
from npu_agent.outputs.labels.compute import labels
from npu_agent.outputs.labels.outputs import NfdOutput, NodeOutput, OutputError, parse, render
from npu_agent.people.simulator.apiserver import NODES
from npu_agent.vendors.furiosa.labels import SETS
from tests.kube.apiserver import FaultyApiServer, applied, own
from tests.outputs.helpers import DirectApi
from tests.outputs.labels.test_compute import HOSTS

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
def applier(server: Server) -> NodeOutput:
    return NodeOutput(server, "n1")


async def test_labels_are_written_once(server: Server, applier: NodeOutput) -> None:
    assert await applier.put(WANTED, careful=False) == Counter(written=2)
    assert server.labels == WANTED
    for next_output in (applier, applier, NodeOutput(server, "n1")):  # a new agent's, too
        assert not (await next_output.put(WANTED, careful=False)).total()
    assert server.server.calls == ["get", "apply", "get", "get", "get"]


async def test_labels_of_the_last_agent_that_no_longer_apply_are_removed(server: Server) -> None:
    old = {**WANTED, "alpha.furiosa.ai/npu.family": "warboy"}
    await NodeOutput(server, "n1").put(old, careful=False)
    server.node["metadata"]["labels"]["example.com/rack"] = "a7"
    done = await NodeOutput(server, "n1").put(WANTED, careful=False)
    assert done == Counter(removed=1, written=0)
    assert server.labels == {**WANTED, "example.com/rack": "a7"}


async def test_drift_is_put_back(server: Server, applier: NodeOutput) -> None:
    await applier.put(WANTED, careful=False)
    server.by_hand(count="7")
    assert await applier.put(WANTED, careful=False) == Counter(put_back=1, removed=0)
    assert server.labels == WANTED
    assert server.applied == set(WANTED)


async def test_the_right_value_in_other_hands_becomes_ours(
    server: Server, applier: NodeOutput
) -> None:
    server.by_hand(count="2")
    assert await applier.put(WANTED, careful=False) == Counter(written=2, removed=0)
    assert server.applied == set(WANTED)


async def test_a_stale_cache_does_not_hide_a_change(server: Server, applier: NodeOutput) -> None:
    await applier.put(WANTED, careful=False)
    before = copy.deepcopy(server.node)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    await applier.put(less, careful=False)
    # The cache still shows what is now wanted again.
    server.after = lambda found: server.server.calls[-1] == "get" and found.update(before)
    assert (await applier.put(WANTED, careful=False))["written"] == 1
    assert server.labels == WANTED


async def test_a_write_whose_answer_was_lost_is_followed_by_another(
    server: Server, applier: NodeOutput
) -> None:
    await applier.put(WANTED, careful=False)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    server.lose(ApiError("no answer", kind=ErrorKind.TIMEOUT))
    with pytest.raises(OutputError, match="no answer"):
        await applier.put(less, careful=False)
    assert server.labels == less
    server.refuse("slow down", kind=ErrorKind.TOO_MANY, status=429)
    with pytest.raises(OutputError, match="slow down"):
        await applier.put(less, careful=False)
    server.recover()
    # The last answer, and perhaps the cache, show what is now wanted again.
    await applier.put(WANTED, careful=False)
    assert server.labels == WANTED
    assert not (await applier.put(WANTED, careful=False)).total()


async def test_a_careful_put_leaves_present_labels(server: Server, applier: NodeOutput) -> None:
    assert await applier.put(WANTED, careful=True) == Counter(written=2, removed=0)
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    assert await applier.put(less, careful=True) == Counter(left=1)
    assert server.labels == WANTED
    assert (await applier.put(less, careful=False))["written"] == 1


async def test_a_node_that_was_made_anew_is_read_again(server: Server, applier: NodeOutput) -> None:
    await applier.put(WANTED, careful=False)
    server.server = FaultyApiServer("n1")
    less = {**WANTED, "beta.furiosa.ai/npu.count": "1"}
    with pytest.raises(OutputError, match="another object") as refused:
        await applier.put(less, careful=False)
    assert refused.value.kind == "conflict"
    await applier.put(less, careful=False)
    assert server.labels == less


async def test_an_error_of_the_api_server_keeps_its_words_and_its_wait(
    server: Server, applier: NodeOutput
) -> None:
    server.refuse("slow down", kind=ErrorKind.TOO_MANY, status=429, retry_after=7.0)
    with pytest.raises(OutputError, match="slow down") as refused:
        await applier.put(WANTED, careful=False)
    assert (refused.value.kind, refused.value.retry_after) == ("too_many", 7.0)


async def test_a_webhook_that_changes_labels_is_reported(
    server: Server, applier: NodeOutput
) -> None:
    webhook = {"beta.furiosa.ai/npu.count": "0"}
    server.after = lambda found: found["metadata"]["labels"].update(webhook)
    with pytest.raises(OutputError, match=r"beta\.furiosa\.ai/npu\.count differ"):
        await applier.put(WANTED, careful=False)


async def test_without_a_node_name_it_says_what_to_set(server: Server) -> None:
    applier = NodeOutput(server, None)
    with pytest.raises(OutputError, match="NODE_NAME is not set") as refused:
        await applier.put(WANTED, careful=False)
    assert refused.value.retry_after == 3600
    assert server.server.calls == []


async def test_clear_takes_exactly_ours(server: Server, applier: NodeOutput) -> None:
    await applier.put(WANTED, careful=False)
    server.node["metadata"]["labels"]["example.com/rack"] = "a7"
    assert await applier.clear() == set(WANTED)
    assert server.labels == {"example.com/rack": "a7"}
    assert await applier.clear() == frozenset()


# The feature file.

ONE = {"beta.furiosa.ai/npu.count": "1", "beta.furiosa.ai/npu.family": "warboy"}
TWO = ONE | {"beta.furiosa.ai/npu.count": "2"}


@pytest.fixture
def output(tmp_path: Path) -> NfdOutput:
    output = NfdOutput(tmp_path)
    output.path.parent.mkdir(parents=True)
    return output


def names(output: NfdOutput) -> list[str]:
    return sorted(path.name for path in output.path.parent.iterdir())


async def test_the_file_has_a_line_a_label_and_nothing_beside_it(output: NfdOutput) -> None:
    done = await output.put(ONE, careful=False)
    assert done == Counter(written=2)
    assert output.path.read_bytes() == (
        b"beta.furiosa.ai/npu.count=1\nbeta.furiosa.ai/npu.family=warboy\n"
    )
    assert output.path.stat().st_mode & 0o777 == 0o644  # nfd-worker is not root
    assert names(output) == ["npu-agent"]
    assert str(output.path).endswith("/etc/kubernetes/node-feature-discovery/features.d/npu-agent")


async def test_the_file_is_not_written_without_a_change(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    before = output.path.stat()
    assert (await NfdOutput(output.path.parents[4]).put(ONE, careful=False)).total() == 0
    after = output.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_without_labels_there_is_no_file(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    assert await output.put({}, careful=False) == Counter(removed=2)
    assert names(output) == []
    assert (await output.put({}, careful=False)).total() == 0


async def test_changes_of_others_to_the_file_are_undone(output: NfdOutput) -> None:
    await output.put(ONE, careful=False)
    output.path.write_text("# mine\nbeta.furiosa.ai/npu.count=9\nevil=1\n", encoding="utf-8")
    assert await output.put(ONE, careful=False) == Counter(put_back=2, removed=1)
    assert output.path.read_bytes() == render(ONE)
    output.path.unlink()
    assert await output.put(ONE, careful=False) == Counter(put_back=2)
    output.path.write_bytes(b"\n" + (render(ONE) or b""))  # the same labels in other words
    assert (await output.put(ONE, careful=False)).total() == 0


async def test_a_careful_put_leaves_present_labels_of_the_file(output: NfdOutput) -> None:
    assert await output.put(ONE, careful=True) == Counter(written=2)
    assert await output.put({}, careful=True) == Counter(left=2)
    assert await output.put(TWO, careful=True) == Counter(left=1)
    assert output.path.read_bytes() == render(ONE)
    assert (await output.put(ONE, careful=True)).total() == 0
    assert await output.put(TWO, careful=False) == Counter(written=1)


async def test_clearing_the_file_takes_away_ours_and_nothing_else(output: NfdOutput) -> None:
    other = output.path.with_name("other")
    other.write_text("vendor.io/x=1\n", encoding="utf-8")
    await output.put(ONE, careful=False)
    assert await output.clear() == ONE.keys()
    assert names(output) == ["other"]
    assert await output.clear() == set()


async def test_a_missing_directory_is_reported_with_its_remedy(tmp_path: Path) -> None:
    output = NfdOutput(tmp_path)
    with pytest.raises(OutputError, match=r"features\.d is missing: install Node") as e:
        await output.put(ONE, careful=False)
    assert e.value.kind == "no_directory"
    assert list(tmp_path.iterdir()) == [], "an NFD that is not there was made up"
    assert (await output.put({}, careful=False)).total() == 0
    output.path.parent.mkdir(parents=True)
    assert await output.put(ONE, careful=False) == Counter(written=2)


async def test_a_file_that_cannot_be_written_is_reported_with_its_remedy(
    output: NfdOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _flags: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "regular", refuse)
    with pytest.raises(OutputError, match=r"npu-agent cannot be replaced: Read-only") as e:
        await output.put(ONE, careful=False)
    assert e.value.kind == "unwritable"
    assert str(output.path) in str(e.value)


async def test_a_file_system_that_hangs_is_reported_and_recovered_from(
    output: NfdOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, opened = threading.Event(), files.regular

    def hang(path: Path, flags: int) -> int:
        free.wait()
        return opened(path, flags)

    monkeypatch.setattr(files, "regular", hang)
    hasty = NfdOutput(output.path.parents[4], deadline=0.05)
    for _ in range(2):
        with pytest.raises(OutputError, match=r"no answer within 0\.05 s") as e:
            await hasty.put(ONE, careful=False)
        assert e.value.kind == "timeout"
    free.set()
    await output.put(ONE, careful=False)
    assert output.path.read_bytes() == render(ONE)


def test_a_file_is_read_as_nfd_reads_it() -> None:
    assert parse(b"# +expiry-time=2012-07-28T11:22:33Z\n\n a/b=c=d \nflag\n\xff=1\n") == {
        "a/b": "c=d",
        "flag": "true",
        "\ufffd": "1",
    }
    assert parse(None) == {}


@pytest.mark.parametrize("name", HOSTS)
def test_every_host_gives_a_file_that_says_the_same(name: str) -> None:
    snapshot, machine = HOSTS[name]
    wanted = labels(snapshot, machine, SETS.values())
    content = render(wanted)
    assert parse(content) == wanted
    assert (content is None) == (not wanted)
    assert len(content or b"") < 65536  # NFD ignores larger ones
