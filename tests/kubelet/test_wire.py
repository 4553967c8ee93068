"""The generated messages encode and decode as google.protobuf does: protos/golden.py."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import betterproto
import pytest

from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra.v1 import NodeUnprepareResourcesResponse

SAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden/messages.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


def kind(name: str) -> type[betterproto.Message]:
    """The class of a message, whose name's case the generator changes."""
    package, _, message = name.rpartition(".")
    module = import_module(f"npu_agent.kubelet.wire.{package}")
    found: type[betterproto.Message]
    (found,) = (each for key, each in vars(module).items() if key.lower() == message.lower())
    return found


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: one["message"])
def test_a_message_has_the_bytes_of_google_protobuf(sample: dict[str, str]) -> None:
    encoded = bytes.fromhex(sample["encoded"])
    assert bytes(kind(sample["message"])().from_dict(sample["value"])).hex() == encoded.hex()
    assert bytes(kind(sample["message"])().parse(encoded)).hex() == encoded.hex()


def test_an_empty_value_of_a_map_is_read_however_it_was_written() -> None:
    """Ours are without it, those of google.protobuf have it."""
    for encoded in ("0a050a03612f62", "0a070a03612f621200"):
        assert list(NodeUnprepareResourcesResponse().parse(bytes.fromhex(encoded)).claims) == [
            "a/b"
        ]


def test_every_message_has_samples() -> None:
    root = Path(__file__).parents[2] / "protos"
    lines = [
        line
        for file in root.glob("*.proto")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert 2 * sum(line.startswith("message ") for line in lines) == len(SAMPLES) > 0
