"""Several vendors' words together."""

from __future__ import annotations

from npu_agent.core.vendor import (
    LabelSet,
    MetricSchema,
    VendorSpec,
    label_sets,
    merged,
    metric_schemas,
)


def vocabulary(vendor: str, *names: str) -> VendorSpec:
    """A vendor with label sets and metric schemas of these names; the first is the default."""
    return VendorSpec(
        families={vendor: (1, 2, 4)},
        resource_name=f"{vendor}/npu",
        socket_name=vendor,
        label_sets={
            name: LabelSet(about=vendor, families={vendor}, prefix=f"{vendor}/", labels=())
            for name in names
        },
        label_set=names[0],
        metric_schemas={
            name: MetricSchema(about=vendor, families={vendor}, metrics=(), renamed={})
            for name in names
        },
        metric_schema=names[0],
    )


A, B = vocabulary("a", "old", "new"), vocabulary("b", "new", "only-b")


def test_core_counts_are_the_widest_devices() -> None:
    assert A.core_counts == {"a": 4}


def test_merged_has_all_of_them_and_the_defaults_of_the_first() -> None:
    both = merged([A, B])
    assert both.families == {"a": (1, 2, 4), "b": (1, 2, 4)}
    assert (both.resource_name, both.socket_name) == ("a/npu", "a")
    assert (both.label_set, both.metric_schema) == ("old", "old")
    assert {name: one.about for name, one in both.label_sets.items()} == {
        "old": "a",
        "new": "a",
        "only-b": "b",
    }
    assert list(both.metric_schemas) == ["old", "new", "only-b"]


def test_each_vendor_has_the_sets_that_are_named_or_its_default() -> None:
    assert label_sets([A, B], ["new"]) == (A.label_sets["new"], B.label_sets["new"])
    assert label_sets([A, B], ["old"]) == (A.label_sets["old"], B.label_sets["new"])
    assert label_sets([A, B], ["old", "new"]) == (*A.label_sets.values(), B.label_sets["new"])
    assert metric_schemas([A, B], "only-b") == (A.metric_schemas["old"], B.metric_schemas["only-b"])
