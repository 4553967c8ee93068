"""Families as the devices package names them, for tests of the configuration."""

from __future__ import annotations

FAMILIES = {"warboy": (1, 2), "rngd": (1, 2, 4, 8)}
