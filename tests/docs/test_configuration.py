"""docs/configuration.md says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from npu_agent.config import KEYS, ConfigError, parse
from npu_agent.vendors import SPEC

from .pages import ROOT

PAGE = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")


def test_the_reference_is_what_the_schema_says() -> None:
    made = subprocess.run(
        [sys.executable, "-B", ROOT / "docs/generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def test_an_option_is_named_as_the_page_says() -> None:
    """In lower case with dashes: `metrics.podLabels` is `--metrics-pod-labels`."""
    assert "`--metrics-pod-labels`" in PAGE
    words = re.compile(r"\.|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    for key in KEYS:
        assert key.option == "--" + words.sub("-", key.name).lower()


def test_examples_are_good() -> None:
    examples = re.findall(r"^```yaml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for text in examples:
        parse(text.encode(), "example", SPEC)


def test_errors_are_real() -> None:
    text = """\
# line 1
interval: 0
default_pe: Single
health:
  failures: 010
"""
    with pytest.raises(ConfigError) as caught:
        parse(text.encode(), "config.yaml", SPEC)
    assert f"```\n{caught.value}\n```" in PAGE
