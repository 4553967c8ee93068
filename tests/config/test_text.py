from __future__ import annotations

import pytest

from npu_agent.config.schema import DisabledDevice
from npu_agent.config.text import as_yaml


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (3, "3"),
        (10.0, "10"),
        (0.5, "0.5"),
        # Text that some YAML reader would take for something else.
        ("2025", '"2025"'),
        ("0000:01:00.0", '"0000:01:00.0"'),
        ("yes", '"yes"'),
        ("null", '"null"'),
        ("", '""'),
        ('a"b\\', r'"a\"b\\"'),
        ("é\x85\U0001f600\U000e0001", '"é\\u0085\U0001f600\\U000e0001"'),
        ((), "[]"),
        (("a", "1"), '[a, "1"]'),
        (DisabledDevice(dev_name="npu0"), "{devName: npu0}"),
        (DisabledDevice(dev_name="npu0", node_name="b"), "{devName: npu0, nodeName: b}"),
    ],
)
def test_as_yaml(value: object, text: str) -> None:
    assert as_yaml(value) == text
