"""What holds with and without libyaml."""

from __future__ import annotations

import pytest
import yaml

from npu_agent.config.values import ConfigError, Null, parsed_yaml


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def _loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "libyaml":
        assert yaml.__with_libyaml__, "the lock files bring a PyYAML with libyaml"
    else:
        monkeypatch.delattr(yaml, "CSafeLoader")


@pytest.mark.parametrize(
    ("text", "null"), [("~", True), ("'~'", False), ("NULL", True), ("|\n", False)]
)
def test_null(text: str, null: bool) -> None:
    assert isinstance(parsed_yaml(f"--- {text}".encode(), "f").value, Null) is null


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a:\n\tb: 1", 2),
        ("a: 1\n b: 2", 2),
        ("a: [1\n", 1),
        ("a: 1\nb: *x", 2),
        ("a: 1\nb: !!str x", 2),
        ("a: 1\n---\nb: 1", 2),
        ("a: 1\nb: '\\x'\nc: \"\\q\"", 3),
        ('a: "\\UFFFFFFFF"', None),
        ('a: "\\ud800"', 1),
        ('a: "\\0"', 1),
        ("%YAML 7.0\n--- x", 1),
        ("[" * 11 + "]" * 11, 1),
    ],
)
def test_refused(text: str, line: int | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_yaml(text.encode(), "f")
    [problem] = caught.value.problems
    # Python's own parser does not say where a character above U+10FFFF was written.
    assert problem.place.line == line or line is None
