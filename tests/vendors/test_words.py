"""The words of the vendor stay in its places: code, docstrings and comments of all others."""

from __future__ import annotations

import re
from pathlib import Path

import npu_agent

PACKAGE = Path(npu_agent.__file__).parent

WORDS = re.compile(
    r"furiosa|warboy|rngd|renegade|1ed2|vitis|atr_error|npu_mgmt|npu_devname"
    r"|device_sn|device_uuid|soc_rev|platform_type|device_type|perf_regs|ne_clk|npu_clocks",
    re.IGNORECASE,
)
"""Names of the vendor, of its families, and of what its drivers, nodes and environment have."""

OWN = (
    "vendors/furiosa/",
    "vendors/__init__.py",  # names the folder
    "people/simulator/driver.py",
    "people/simulator/families.py",
)


def test_the_vendors_words_are_in_its_places_alone() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        lines = [
            line for line in path.read_text(encoding="utf-8").splitlines() if WORDS.search(line)
        ]
        if lines and not name.startswith(OWN):
            found[name] = lines
    assert found == {}


def test_the_searched_words_and_places_exist() -> None:
    (folder, *modules) = (PACKAGE / place for place in OWN)
    own = (*folder.glob("*.py"), *modules)
    text = "".join(path.read_text(encoding="utf-8") for path in own).lower()
    for word in WORDS.pattern.split("|"):
        assert word in text, word
