"""Links lead somewhere, `make` targets that are named exist, tables are whole."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest

from .pages import ROOT, Page, pages

PAGES = pages()
INDEX = Page(ROOT / "docs/README.md").text
TARGETS = set(
    re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue  # another place's business
        path, _, anchor = unquote(link).partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (anchor and anchor not in Page(target).anchors):
            broken.append(link)
    assert not broken


def test_files_that_are_named_exist() -> None:
    """`docs/labels.md` between backticks is as good as a link."""
    named = {
        (page.name, path)
        for page in PAGES
        for text in page.inline
        for path in re.findall(r"^((?:docs|k8s|tests|npu_agent|packaging)/[\w./-]*\w)/?$", text)
    }
    assert named
    assert not {(where, path) for where, path in named if not (ROOT / path).exists()}


def test_runbooks_lead_to_a_heading() -> None:
    rules = (ROOT / "k8s/components/alerts/prometheusrule.yaml").read_text(encoding="utf-8")
    anchors = re.findall(r"runbook_url: *\S+/runbook#(\S+)", rules)
    assert len(anchors) == rules.count(" alert: ")
    assert set(anchors) <= set(Page(ROOT / "docs/alerts.md").anchors)
    served = (ROOT / "npu_agent/outputs/web/runbook.en.html").read_text(encoding="utf-8")
    assert all(f'id="{anchor}"' in served for anchor in anchors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Page) -> None:
    code = [line for _, block in page.blocks for line in block.splitlines()] + page.inline
    asked = {
        target
        for line in code
        if (match := re.match(r"(?:\$ |sudo )*make((?: +[\w=./:\"-]+)+)", line))
        for target in match[1].split()
        if re.fullmatch("[a-z][a-z0-9-]*", target)
    }
    assert asked <= TARGETS


def test_alerts_that_are_spoken_of_exist() -> None:
    files = ("components/alerts/prometheusrule.yaml", "examples/test-alert.yaml")
    rules = "".join((ROOT / "k8s" / name).read_text(encoding="utf-8") for name in files)
    now = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which has former names too
    spoken = {name for page in now for name in re.findall(r"\bNpu[A-Z]\w+", page.text)}
    assert spoken <= set(re.findall(r"alert: (\w+)", rules))


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    index = Page(ROOT / "docs/README.md")
    listed = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links}
    there = {*(ROOT / "docs").rglob("*.md")} - {index.path}
    assert there <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Page) -> None:
    """An empty line ends a table, and cells that its head does not have are not shown."""
    for table in re.findall(r"(?:^ *\|.*\n)+", page.prose, re.MULTILINE):
        head, *rows = (row.replace("\\|", "").strip() for row in table.splitlines())
        assert re.fullmatch("[| :-]+", rows[0] if rows else head), head
        assert [row for row in rows if row.count("|") != head.count("|")] == []
