"""npu_agent.typedjson."""

from __future__ import annotations

import msgspec
import pytest

from npu_agent.typedjson import InvalidJsonError, convert, decode


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    labels: dict[str, str] | None = None


class Node(msgspec.Struct, frozen=True):
    metadata: Meta
    taints: list[Meta] | None = None


def test_known_fields_are_read_and_others_ignored() -> None:
    answer = '{"metadata": {"resourceVersion": "7", "labels": null, "uid": 1}, "spec": {}}'
    assert decode(answer, Node) == Node(Meta("7"))
    assert convert({"resourceVersion": "7"}, Meta) == Meta("7")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{}", "metadata is missing"),
        ('{"metadata": {}}', "metadata.resourceVersion is missing"),
        ('{"metadata": {"resourceVersion": 7}}', "metadata.resourceVersion: expected str, got int"),
        (
            '{"metadata": {"resourceVersion": "7"}, "taints": [{"resourceVersion": "7"}, 3]}',
            "taints[1]: expected object, got int",
        ),
        ("[]", "expected object, got array"),
        ("<html>", "not JSON (JSON is malformed: invalid character (byte 0))"),
        ("", "not JSON (Input data was truncated)"),
        (
            b'{"metadata": {"resourceVersion": "\xff"}}',
            "not JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        ),
    ],
)
def test_an_error_names_the_field(document: bytes | str, words: str) -> None:
    with pytest.raises(InvalidJsonError) as raised:
        decode(document, Node)
    assert str(raised.value) == words


def test_values_that_are_nested_too_deep() -> None:
    with pytest.raises(InvalidJsonError, match="not JSON"):
        decode('{"metadata": ' * 100_000, Node)
    with pytest.raises(InvalidJsonError, match=r"resourceVersion is missing"):
        convert({}, Meta)
