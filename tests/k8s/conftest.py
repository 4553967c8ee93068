"""Overlays, as users write them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml

from .tools import K8S, Object, kustomize, objects

Overlay = Callable[..., list[Object]]


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """Makes the objects of an overlay with these components and whatever else is given."""

    def make(
        components: Iterable[str] = (), resources: Iterable[str] = (".",), **fields: object
    ) -> list[Object]:
        def path(to: str) -> str:
            return os.path.relpath(K8S / to, tmp_path.resolve())

        text = {
            "resources": [path(one) for one in resources],
            "components": [path(f"components/{one}") for one in components],
            **fields,
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return objects(kustomize(tmp_path))

    return make
