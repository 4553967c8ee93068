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
INSTEAD = {
    "ko": {
        r"Kubernetes": "쿠버네티스",
        r"프로메테우스": "Prometheus",
        r"구성 요소": "컴포넌트",
        r"벤더": "제조사",
        r"저장소": "리포지터리",
        r"라벨": "레이블",
        r"고장": "장애, 비정상",
        r"대역": "스텁, 모의",
        r"(?<![가-힣])폭(?!넓)": "코어 수, 디바이스당 코어 수",
        r"내[주준줄]|아무에게도|남의 ": "할당",
        r"누군가": "다른 프로그램, 사용자",
        r"문구 그대로": "say it again, or leave the cell out",
        r"십시오|[습십]니까": "-하세요",
        r"\| 뜻 \||\| 증상 \| 보이는 것": "의미, 조치",
    },
    "ja": {
        r"クレーム": "ResourceClaim",
        r"代役": "スタブ",
        r"(?<![大小])幅": "デバイスあたりのコア数",
        r"本物": "実際",
        r"イベント(?!ループ)": "Event",
        r"(?<![\w-])taint": "テイント",
        r"(サーバ|ドライバ|ディレクトリ|エントリ|メモリ)(?!ー)": "with ー at its end",
        r"\| 不要": "対処不要",
        r"[かす]か。? \||\?": "an imperative",
        r"[\uff08\uff09]": "( and )",
        r"[ぁ-ヿ一-鿿] \w|[\w`] [ぁ-ヿ一-鿿]": "no space",
    },
}
"""Words of these languages that are not those of docs/dev/terms.md or of Kubernetes' own pages.

A pattern, and what to write; the list is held to the columns of docs/dev/terms.md as well.
"""


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


def test_a_page_that_lags_says_so_to_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    english, korean = tmp_path / "docs/a.md", tmp_path / "docs/ko/a.md"
    korean.parent.mkdir(parents=True)
    english.write_text("# A\n")
    hashed = "<!-- translation of docs/a.md at {} -->\n"
    up_to_date = translations.hashlib.sha256(b"# A\n").hexdigest()[:12]
    korean.write_text(hashed.format(up_to_date) + "# 가\n")
    assert translations.current(korean) == korean.read_text()
    english.write_text("# A\n\nmore\n")
    late = translations.current(korean)
    assert "(../a.md)" in late.splitlines()[1]
    korean.write_text(late)
    assert translations.current(korean) == late
    english.write_text("# A\n")
    assert translations.current(korean) == hashed.format(up_to_date) + "# 가\n"
    korean.write_text("# 가\n")
    with pytest.raises(ValueError, match="sha256sum docs/a"):
        translations.current(korean)


@pytest.mark.parametrize("language", ["ko", "ja"])
def test_links_lead_to_the_page_in_the_readers_language(language: str) -> None:
    theirs = ROOT / "docs" / language
    english = {ROOT / "docs" / path.name for path in theirs.glob("*.md")}
    for one in (page(f"README.{language}.md"), *map(Page, sorted(theirs.glob("*.md")))):
        for link in one.links:
            target = (one.path.parent / link.partition("#")[0]).resolve()
            lags = target.name == one.path.name  # it leads to the English page of the same name
            assert lags or target not in english, f"{one.name}: {link}"


@pytest.mark.parametrize("language", INSTEAD)
def test_terms_are_those_of_the_list(language: str) -> None:
    column = {"ko": 1, "ja": 2}[language]
    rows = re.findall(r"^\| .*", page("docs/dev/terms.md").text, re.MULTILINE)
    texts = {"docs/dev/terms.md": "\n".join(row.split(" | ")[column] for row in rows)}
    ours = [path for path in PAGES if path.parent.name == language and not translations.lags(path)]
    for one in (page(f"README.{language}.md"), *map(Page, ours)):
        prose = re.sub(r"`[^`\n]*`", "``", one.prose)
        texts[one.name] = re.sub(r"\]\([^)]*\)", "]", prose)
    found = [
        f"{name}: {text[max(match.start() - 20, 0) : match.end() + 20]!r}: {instead}"
        for name, text in texts.items()
        for wrong, instead in INSTEAD[language].items()
        for match in re.finditer(wrong, text)
    ]
    assert not found, "\n".join(found)
