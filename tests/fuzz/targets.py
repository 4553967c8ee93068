"""What is fuzzed: a line for each parser, with what it may raise and what must hold of its result.

Not here: kubeconfigs, which are the user's own and read by kubernetes_asyncio; CDI files, which the
agent writes and compares byte by byte, and never reads a value from; TLS and HTTP/2 below gRPC,
which are OpenSSL's, aiohttp's and h2's.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gzip
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from grpclib.exceptions import GRPCError
from prometheus_client.parser import text_string_to_metric_families

from npu_agent.config import ConfigError
from npu_agent.config.load import parse as parse_config
from npu_agent.core.hardware import CardState, Health, HealthState
from npu_agent.core.ledger import DeviceName, Ledger
from npu_agent.core.offer import cut, device_id
from npu_agent.core.pool import ClaimRef
from npu_agent.core.vendor import NotServedError
from npu_agent.feed import Feed
from npu_agent.kube import ThisNode, client, dra, errors, reviews
from npu_agent.kube.credentials import at, node_of
from npu_agent.kube.errors import ApiError
from npu_agent.kube.request import Request
from npu_agent.kubelet import lock, podresources, pods
from npu_agent.kubelet.record import encode, recover
from npu_agent.outputs.deviceplugin.service import DevicePlugin
from npu_agent.outputs.dra import slices
from npu_agent.outputs.dra.service import DraPlugin, Registration
from npu_agent.outputs.labels import compute, outputs
from npu_agent.outputs.prometheus import cards
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.routes import Route, Router, text_answer
from npu_agent.people import simulator
from npu_agent.people.commands.config import show
from npu_agent.people.doctor import host
from npu_agent.people.simulator import replay
from npu_agent.people.simulator.picture import Link
from npu_agent.typedjson import InvalidJsonError
from npu_agent.typedjson import decode as decode_json
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.spec import SPEC
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.outputs.deviceplugin.allocator import StandInAllocator
from tests.outputs.deviceplugin.helpers import devices, snapshot, state
from tests.outputs.dra.cards import card, pool_of
from tests.outputs.dra.helpers import StandInClaims
from tests.outputs.prometheus.helpers import own as new_agent

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser of bytes that somebody else has written."""

    name: str
    """As its directory in the corpus."""
    parse: Callable[[bytes], Any]
    """Reads an input; tells by an AssertionError what does not hold of the result."""
    allowed: tuple[type[Exception], ...] = ()
    """What it may raise: whatever its caller catches, in words for people."""
    tries: int = 60
    """New inputs that the unit tests try, beside those that are kept."""


def attempt(target: Target, data: bytes) -> None:
    """Tries an input; raises what is wrong with the parser, if anything is."""
    try:
        target.parse(data)
    except target.allowed as error:
        _words(str(error))


def _words(text: str) -> None:
    """What people may be shown: of any length that a terminal and a Pod's events can take."""
    assert len(text) < 10_000, f"an error of {len(text)} characters"
    assert all(char.isprintable() or char == "\n" for char in text), f"not fit to show: {text!r}"


def _plain(*texts: str | None) -> None:
    for text in texts:
        assert text is None or (text.isprintable() and len(text) <= 256), text


def _run(call: Coroutine[Any, Any, T]) -> T:
    """What it returns; without a loop, which would take as long as a hundred inputs."""
    while True:
        try:
            call.send(None)
        except StopIteration as end:
            return cast("T", end.value)


# Drivers.


def _sysfs_text(data: bytes) -> None:
    _plain(parse.text(data))
    name = parse.identifier(data)
    assert name is None or re.fullmatch(r"[A-Za-z0-9][\w.:-]{0,49}", name, re.ASCII), name
    address = parse.pci_address(data)
    assert address is None or (address.islower() or not re.search("[a-z]", address)), address
    assert not {"/", "\n"} & set(address or ""), address
    assert "/" not in (parse.device_number(data) or "")
    number = parse.integer(data)
    assert number is None or -(1 << 63) <= number < 1 << 64
    assert 0 <= (parse.numa_node(data) or 0) < 1 << 16


def _sysfs_numbers(data: bytes) -> None:
    found = parse.numbers(data)
    _plain(*dict(found))
    assert len(dict(found)) == len(found) <= 256
    assert all(0 <= number < 1 << 64 for _, number in found)
    assert all(re.fullmatch("[a-z0-9_]+", name) for name, _ in parse.errors(data))
    for width in (2, 8):
        assert len(parse.per_core(data, width)) in (0, width)


def _sysfs_counters(data: bytes) -> None:
    for understand in (parse.perf_regs, parse.metrics, parse.alloc_status):
        found = understand(data)
        assert found is None or all(0 <= number < 1 << 64 for number in found)


_FILES = (
    *("device_type", "device_uuid", "device_sn", "alive", "heartbeat", "atr_error", "version"),
    *("fw_version", "busname", "soc_rev", "platform_type", "dev", "npu_clocks", "ne_clk_freq_info"),
)


@functools.cache
def _tree() -> Path:
    """The driver tree of a card, removed when the program ends."""
    root = Path(tempfile.mkdtemp(prefix="npu-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    simulator.make(root, simulator.parse_cards("warboy=1"))
    return root


def _sysfs_card(data: bytes) -> None:
    """The first byte says which file of a card has the others."""
    file = _tree() / "sys/class/npu_mgmt/npu0_mgmt" / _FILES[(data or b"\0")[0] % len(_FILES)]
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(data[1:])
    try:
        vendor = Furiosa(_tree())
        (entry,) = vendor.scan()
        found = vendor.identify(entry)
        reading = vendor.read(entry, found)
        _sysfs_shown(found, reading)
        vendor.probe(entry)
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)


_SCHEMA = SPEC.metric_schemas["0.8"]
_SETS = tuple(SPEC.label_sets.values())


def _sysfs_shown(found: Any, reading: Any) -> None:
    """A card as Kubernetes, Prometheus and the labels have it."""
    health = Health(state=HealthState.HEALTHY, reason="works", since=0.0)
    id_ = found.uuid or found.serial or found.pci_bus_id or "npu0"
    assert len(device_id(id_, found.all_cores)) <= 63
    seen = snapshot(CardState(id=id_, card=found, health=health, reading=reading))
    shown = cards.series(new_agent(snapshot=seen), pod_labels=True)
    page = b"".join(family.render(openmetrics=False) for family in cards.families(_SCHEMA, shown))
    assert [*text_string_to_metric_families(page.decode())]
    _labels(compute.labels(seen, compute.Machine(vendor=None, name=None), _SETS))


def _labels(found: dict[str, str]) -> None:
    for key, value in found.items():
        assert re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", value, re.ASCII), (key, value)


def _machine(data: bytes) -> None:
    """As `npu_agent.outputs.labels.compute` reads the names that a machine's maker gave it."""
    said = data[:256].decode(errors="replace")
    seen = snapshot(state("warboy"), state("rngd", 1))
    machine = compute.Machine(vendor=said, name=said)
    _labels(compute.labels(seen, machine, _SETS))
    for one in compute.explained(seen, machine, _SETS):
        _words(one.why)


def _pci_id(data: bytes) -> None:
    with _file(data) as path:
        found = host._id(path)
    assert len(found) <= 64, found


# Users.


def _config(data: bytes) -> None:
    found = parse_config(data, "config.yaml", SPEC)
    again = parse_config(show(found).encode(), "config.yaml", SPEC)
    assert again.config == found.config


def _accept(data: bytes) -> None:
    header = data.decode("utf-8", "surrogateescape")  # as aiohttp does it
    route = Route(lambda wanted: text_answer(f"{wanted.openmetrics}" * 300), in_formats=True)
    pages = Router({"/metrics": route})
    answer = pages.answer("GET", "/metrics", accept=header, encodings=header, languages=header)
    assert ("Content-Encoding" in answer.headers) == ("gzip" in header)
    body = gzip.decompress(answer.body) if "gzip" in header else answer.body
    assert body.startswith(b"True") == ("application/openmetrics-text" in header)


def _authorization(data: bytes) -> None:
    header = data.decode("utf-8", "surrogateescape")
    api: Any = _Api(b'{"kind":"TokenReview"}')
    refusal = asyncio.run(Authorizer(api).refusal(header, "/metrics", "::1"))
    assert refusal is not None
    assert refusal.status in (401, 429, 503), refusal.status
    _words(refusal.body.decode())


def _token(data: bytes) -> None:
    node = node_of(data.decode("utf-8", "replace"))
    assert node is None or re.fullmatch(r"[a-z0-9.-]+", node), node


def _feature_file(data: bytes) -> None:
    found = outputs.parse(data)
    assert all(key and not key.startswith("#") and "\n" not in key for key in found)


# The kubelet.


def _pod_resources(data: bytes) -> None:
    for found in podresources.read_list(data):
        assert list(found) == sorted(set(found))


def _kubelet_checkpoint(data: bytes) -> None:
    decode_json(data, pods._Checkpoint)


_CARDS = (state("warboy"), state("warboy", 1), state("rngd", 2))


def _device_plugin() -> Any:
    feed = Feed(devices(*_CARDS))
    return DevicePlugin("beta.furiosa.ai/npu", feed, StandInAllocator(feed))


def _dra_plugin() -> Any:
    async def prepare(refs: Any) -> dict[str, str]:
        return dict.fromkeys(map(_named, refs), "refused")

    async def unprepare(refs: Any) -> str:
        for ref in refs:
            _named(ref)
        return ""

    return DraPlugin(StandInClaims(prepare, unprepare))


def _named(ref: ClaimRef) -> str:
    """Its UID, which becomes part of a file's name."""
    assert isinstance(ref.uid, str), ref.uid
    assert not {"/", "\0"} & set(ref.uid), ref.uid
    assert len(ref.uid.encode()) < 200
    return ref.uid


_SERVICES: tuple[tuple[Callable[[], Any], tuple[str, ...]], ...] = (
    (_device_plugin, ("Allocate", "GetPreferredAllocation", "PreStartContainer")),
    (_dra_plugin, ("v1.DRAPlugin/NodePrepareResources", "v1.DRAPlugin/NodeUnprepareResources")),
    (lambda: Registration("npu.furiosa.ai", Path("/s")), ("GetInfo", "NotifyRegistrationStatus")),
)
METHODS = tuple((made, name) for made, names in _SERVICES for name in names)


def _grpc_request(data: bytes) -> None:
    """The first byte says which method is called with the message that the others are."""
    made, name = METHODS[(data or b"\0")[0] % len(METHODS)]
    table = made().__mapping__()
    handler = next(one for path, one in table.items() if path.endswith(name))
    message = data[1:]
    stream = _Stream(message, handler.request_type)
    with contextlib.suppress(
        AttributeError, TypeError
    ):  # fields of other types; grpclib answers UNKNOWN
        (asyncio.run if made is _dra_plugin else _run)(handler.func(stream))
        assert len(stream.sent) == 1


class _Stream:
    """Of a call: its request, and what is sent."""

    def __init__(self, data: bytes, kind: Any) -> None:
        self._data = data
        self._kind = kind
        self.sent: list[bytes] = []

    async def recv_message(self) -> Any:
        return self._kind.FromString(self._data)

    async def send_message(self, message: Any) -> None:
        self.sent.append(message.SerializeToString())

    async def send_trailing_metadata(self) -> None:
        pass


# The agent before this one.


def _ledger_record(data: bytes) -> None:
    ledger = recover(Ledger(), data, 1.0)
    here = [each.card for each in _CARDS]
    conflicts = ledger.conflicts(here)
    for device in (*devices(*_CARDS), *(part for each in _CARDS for part in cut(each, 1))):
        conflicts.against(DeviceName("beta.furiosa.ai/npu", device.id), device)
        ledger.is_published(device.card_id, device.card)
    ledger.usages(_CARDS, ())
    again = ledger.with_answer((), 2.0, cards=here, resources=["beta.furiosa.ai/npu"])
    record = encode(again.with_published("npu.furiosa.ai", _CARDS))
    assert encode(recover(Ledger(), record, 3.0)) == record


def _lock(data: bytes) -> None:
    descriptor = os.memfd_create("lock")
    try:
        os.write(descriptor, data)
        _words(str(lock.read_owner(descriptor)))
    finally:
        os.close(descriptor)


# The API server, and proxies before it.

_CREDENTIALS = at("https://a", "a test")
_GET = Request(verb="get", kind="Node", name="n", answer=ThisNode)


class _Api:
    """Answers each request with the same bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def ask(self, request: Request[T], **_: Any) -> T:
        return client.read_answer(request, self._data, _CREDENTIALS)


def _refusal(data: bytes) -> None:
    """A status, a line with Retry-After, and the body."""
    first, _, body = data.partition(b"\n")
    status, _, wait = first.partition(b" ")
    code = int(status) if re.fullmatch(rb"[345]\d\d", status) else 403
    headers = {"Retry-After": wait.decode("utf-8", "surrogateescape")}
    found = errors.answered(_GET, code, headers, body, _CREDENTIALS)
    assert found.retry_after is None or 0 <= found.retry_after <= errors.LONGEST_WAIT
    _words(str(found))


def _node(data: bytes) -> None:
    found = client.read_answer(_GET, data, _CREDENTIALS).metadata
    assert all(isinstance(text, str) for text in (found.name, found.uid, *found.labels.values()))
    assert all(isinstance(key, str) for key in found.applied)


def _claim(data: bytes) -> None:
    answer = _run(dra.read_claim(_Api(data), "n", "c"))  # type: ignore[arg-type]
    found = dra.claim_of(answer, "npu.furiosa.ai")
    for one in found.devices:
        assert all(isinstance(text, str) and text for text in (one.request, one.pool, one.name))


def _review(data: bytes) -> None:
    api: Any = _Api(data)
    user = _run(reviews.user_of(api, "token", deadline=1.0))
    if user is not None:
        said = json.loads(data)["status"]
        assert said["authenticated"] is True
        assert user.name == said["user"]["username"]
        hash(user.name)
        data = data.replace(b"TokenReview", b"SubjectAccessReview")
        may = _run(reviews.may_get(_Api(data), user, "/", deadline=1.0))  # type: ignore[arg-type]
        assert not may or said["allowed"] is True


def _slices(data: bytes) -> None:
    """The list, and the events of a watch, are one input: the first line is the list."""
    first, _, rest = data.partition(b"\n")
    with contextlib.suppress(ApiError):
        _planned(_run(dra.list_slices(_Api(first), "n", "d")).slices)  # type: ignore[arg-type]
    for line in rest.split(b"\n"):
        event = client.read_event(dra.watch_slices("n", "d"), line, _CREDENTIALS)
        assert event.version
        assert (event.object is None) == (event.type == "BOOKMARK")
        assert event.object is None or isinstance(event.object.metadata.name, str)


def _planned(live: Any) -> None:
    """What the publisher makes of what is there."""
    whose = {"driver": "npu.furiosa.ai", "node": "n", "uid": "7b0c"}
    devices = pool_of(card("rngd", 0))
    wanted = slices.writes(live, lambda at: slices.slices(devices, **whose, generation=at))
    for each in wanted.apply:
        slices.keeping_times(each, live)
    slices.is_incomplete(live)


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    descriptor = os.memfd_create("input")
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _record(data: bytes) -> None:
    """A record's manifest, or a whole tar; a gzip on its own would refuse nearly all of them."""
    if data.startswith(b"{"):
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as tar:
            for name, content in ((replay.MANIFEST, data), ("sys/class/npu_mgmt/a", b"1\n")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        data = plain.getvalue()
    with _file(gzip.compress(data, 1)) as path:
        found = replay.load(path)
    for name, shown in found.picture().items():
        assert ".." not in Path(name).parts
        assert name.startswith(("sys/", "dev/"))
        if isinstance(shown, Link):
            end = os.path.normpath(Path(name).parent / shown.target)
            assert end.startswith("sys/")


TARGETS = (
    Target(name="sysfs-text", parse=_sysfs_text),
    Target(name="sysfs-numbers", parse=_sysfs_numbers),
    Target(name="sysfs-counters", parse=_sysfs_counters),
    Target(name="sysfs-liveness", parse=parse.liveness, allowed=(ValueError,)),
    Target(name="sysfs-card", parse=_sysfs_card, allowed=(NotServedError, ValueError), tries=12),
    Target(name="machine", parse=_machine),
    Target(name="pci-id", parse=_pci_id),
    Target(name="config", parse=_config, allowed=(ConfigError,)),
    Target(name="accept", parse=_accept),
    Target(name="authorization", parse=_authorization),
    Target(name="token", parse=_token),
    Target(name="feature-file", parse=_feature_file),
    Target(name="pod-resources", parse=_pod_resources, allowed=(ValueError,)),
    Target(name="allocatable", parse=podresources.read_allocatable, allowed=(ValueError,)),
    Target(name="grpc-request", parse=_grpc_request, allowed=(GRPCError,)),
    Target(name="kubelet-checkpoint", parse=_kubelet_checkpoint, allowed=(InvalidJsonError,)),
    Target(name="ledger-record", parse=_ledger_record),
    Target(name="lock", parse=_lock),
    Target(name="api-refusal", parse=_refusal),
    Target(name="node", parse=_node, allowed=(ApiError, ValueError)),
    Target(name="claim", parse=_claim, allowed=(ApiError, ValueError)),
    Target(name="review", parse=_review, allowed=(ApiError,)),
    Target(name="record", parse=_record, allowed=(replay.RecordingError,)),
    Target(name="slices", parse=_slices, allowed=(ApiError,)),
)
