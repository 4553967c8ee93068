"""Overlays, as users write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from . import tools

Overlay = Callable[..., list[tools.Object]]


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """Makes the objects of an overlay with these components and whatever else is given."""
    return functools.partial(tools.overlay, tmp_path)
