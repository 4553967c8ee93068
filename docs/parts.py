"""Parts of pages that are made from something else: between two marks, mostly a table."""

from __future__ import annotations

from pathlib import Path

_BEGIN = "<!-- from {} by `make docs`: begin -->\n"
_END = "<!-- end -->\n"


def current(page: Path, source: str, part: str) -> str:
    """The page with `part`, its part that is made from `source`.

    Raises:
        ValueError: the marks are not there, or in disorder.
    """
    mark = _BEGIN.format(source)
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} has lost its marks {mark.strip()} and {_END.strip()}")
    return f"{before}{mark}\n{part}\n{_END}{after}"


def cell(text: str) -> str:
    """A sentence as a cell of a table, in Markdown."""
    return text.removesuffix(".").replace("|", "\\|").replace("<", "\\<")
