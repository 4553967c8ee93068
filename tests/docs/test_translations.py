"""Korean and Japanese pages have what their English ones have, or say that they lag behind."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT, Page, page

sys.path.insert(0, str(ROOT / "docs"))
translations: Any = import_module("translations")
PAGES = sorted(translations.pages())


def commands(one: Page) -> list[tuple[str, str]]:
    """The code blocks without comments, which are translated."""
    return [(language, re.sub(r" *#.*", "", code)) for language, code in one.blocks]


def quoted(one: Page) -> set[str]:
    """What stands between backticks; the words of a placeholder are translated."""
    return {re.sub(r"<[^>]*>", "<>", text) for text in one.inline}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_page_that_is_up_to_date_has_the_same_sections_and_commands(path: Path) -> None:
    translated, english = Page(path), Page(translations.source(path))
    if translations.lags(path):
        assert translations.current(path) == translated.text, "make docs puts a line for readers"
        return
    assert [level for level, _ in translated.headings] == [level for level, _ in english.headings]
    assert commands(translated) == commands(english)
    for language, _ in english.blocks:
        assert language == language.strip()
    left_out = quoted(english) - quoted(translated)
    assert not left_out
    assert list(translations.differences(path)) == []


def test_a_page_that_lags_says_so_to_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    english, korean = tmp_path / "docs/a.md", tmp_path / "docs/ko/a.md"
    korean.parent.mkdir(parents=True)
    english.write_text("# A\n", encoding="utf-8")
    hashed = "<!-- translation of docs/a.md at {} -->\n"
    up_to_date = translations.hashlib.sha256(b"# A\n").hexdigest()[:12]
    korean.write_text(hashed.format(up_to_date) + "# 가\n", encoding="utf-8")
    assert translations.current(korean) == korean.read_text(encoding="utf-8")
    english.write_text("# A\n\nmore\n", encoding="utf-8")
    late = translations.current(korean)
    assert "(../a.md)" in late.splitlines()[1]
    korean.write_text(late, encoding="utf-8")
    assert translations.current(korean) == late
    english.write_text("# A\n", encoding="utf-8")
    assert translations.current(korean) == hashed.format(up_to_date) + "# 가\n"
    korean.write_text("# 가\n", encoding="utf-8")
    with pytest.raises(ValueError, match="sha256sum docs/a"):
        translations.current(korean)


def test_a_page_that_lacks_a_list_item_or_a_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    english, korean = tmp_path / "docs/a.md", tmp_path / "docs/ko/a.md"
    korean.parent.mkdir(parents=True)
    page = "# A\n\n- b\n- c\n\n## D\n\n| e |\n|---|\n| f |\n\n```\n- g\n```\n"
    english.write_text(page, encoding="utf-8")
    up_to_date = translations.hashlib.sha256(page.encode()).hexdigest()[:12]
    hashed = f"<!-- translation of docs/a.md at {up_to_date} -->\n"
    korean.write_text(hashed + page, encoding="utf-8")
    assert list(translations.differences(korean)) == []
    korean.write_text(hashed + page.replace("- c\n", "").replace("| f |\n", ""), encoding="utf-8")
    assert list(translations.differences(korean)) == [
        f"{korean}, A: 1 list items, and 2 in English",
        f"{korean}, D: 2 table rows, and 3 in English",
    ]
    english.write_text("# A\n", encoding="utf-8")
    assert list(translations.differences(korean)) == [], "it says that it lags behind"


@pytest.mark.parametrize("language", ["ko", "ja"])
def test_links_lead_to_the_page_in_the_readers_language(language: str) -> None:
    theirs = ROOT / "docs" / language
    english = {ROOT / "docs" / path.name for path in theirs.glob("*.md")}
    for one in (page(f"README.{language}.md"), *map(Page, sorted(theirs.glob("*.md")))):
        for link in one.links:
            target = (one.path.parent / link.partition("#")[0]).resolve()
            lags = target.name == one.path.name  # it leads to the English page of the same name
            assert lags or target not in english, f"{one.name}: {link}"
