"""What is made of a Node's metadata."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.kube.node import applied_labels, node_meta
from tests.kube.helpers import NODE


def entry(labels: object, **others: Any) -> dict[str, Any]:
    return {
        "manager": "npu-agent",
        "operation": "Apply",
        "fieldsV1": {"f:metadata": {"f:labels": labels}},
        **others,
    }


@pytest.mark.parametrize(
    ("managed_fields", "expected"),
    [
        (None, set()),
        ([], set()),
        ([entry({"f:a": {}, "f:example.com/b": {}, ".": {}})], {"a", "example.com/b"}),
        ([entry({"f:f:a": {}})], {"f:a"}),
        ([entry({"f:a": {}}), entry({"f:b": {}}, manager="kubectl")], {"a"}),
        ([entry({"f:a": {}}, operation="Update")], set()),
        ([entry({"f:a": {}}, subresource="status")], set()),
        ([entry({"f:a": {}}, subresource="")], {"a"}),
        ([entry({})], set()),
        ([entry(None)], set()),
        ([entry(["f:a"])], set()),
        ([entry({"f:a": {}}, fieldsV1="x"), entry({"f:b": {}})], {"b"}),
        (["x", None, 5, entry({"f:a": {}})], {"a"}),
        ({"manager": "npu-agent"}, set()),
    ],
)
def test_applied_labels(managed_fields: object, expected: set[str]) -> None:
    assert applied_labels(managed_fields) == expected


words = st.sampled_from(
    ["manager", "operation", "npu-agent", "Apply", "fieldsV1", "f:metadata", "f:labels", "f:a"]
) | st.text(max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=6,
)


@given(json_values, st.lists(st.builds(entry, json_values), max_size=2))
def test_malformed_managed_fields_never_raise(one: object, many: list[Any]) -> None:
    for managed_fields in (one, many, [one, *many]):
        meta = {**NODE["metadata"], "managedFields": managed_fields}
        assert node_meta({"metadata": meta}).applied == applied_labels(managed_fields)


def test_no_labels_are_an_empty_mapping() -> None:
    meta = {**NODE["metadata"], "labels": None}
    assert node_meta({"metadata": meta}).labels == {}
    del meta["labels"]
    assert node_meta({"metadata": meta}).labels == {}
