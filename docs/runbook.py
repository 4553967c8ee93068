"""The runbook that the agent serves beside its status page, made of two pages of docs/.

A person who reads the status page through a port-forward, in a cluster without the internet or with
an older agent, gets the steps for the very agent that is asked.

`python docs/runbook.py` writes it; the repository does not keep it. packaging/hatch.py does so for
every wheel and editable install.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = Path(__file__).parent
_SERVED = DOCS.parent / "npu_agent/outputs/web"
FILES = {language: _SERVED / f"runbook.{language}.html" for language in ("en", "ko", "ja")}
_PAGES = ("alerts.md", "troubleshooting.md")
_MARK = re.compile(r"<!-- .* -->\n")
"""What encloses a part of a page that is made from something else: docs/parts.py."""


def runbook(language: str) -> str:
    """The HTML fragment; its anchors are those of the English one in every language."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def parsed(folder: Path) -> list[list[Token]]:
        return [
            parser.parse(_MARK.sub("", (folder / name).read_text(encoding="utf-8")))
            for name in _PAGES
        ]

    english = parsed(DOCS)
    made = english if language == "en" else parsed(DOCS / language)
    names: dict[str, str] = {}
    for page, ours, theirs in zip(_PAGES, map(_anchors, made), map(_anchors, english), strict=True):
        if len(ours) != len(theirs):
            raise ValueError(f"docs/{language}/{page} lacks sections of docs/{page}: add them")
        names |= zip(ours, theirs, strict=True)
    for tokens in made:
        _name_headings(tokens, names)
    anchors = {str(token.attrs["id"]) for tokens in made for token in tokens if "id" in token.attrs}
    for tokens in made:
        _turn_links(tokens, anchors, names)
    return "".join(
        f"<article>\n{parser.renderer.render(tokens, parser.options, {})}</article>\n"
        for tokens in made
    )


def write() -> None:
    """Writes the runbook in every language to where the page reads it."""
    for language, file in FILES.items():
        made = file.with_suffix(".new")
        made.write_text(runbook(language), encoding="utf-8")
        made.replace(file)  # whole at every moment: several test runs may share a checkout


def _anchor(heading: Token) -> str:
    """As GitHub has it, so that links of docs/ are right here too."""
    text = heading.content.replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _anchors(tokens: list[Token]) -> list[str]:
    return [_anchor(inline) for token, inline in pairwise(tokens) if token.type == "heading_open"]


def _name_headings(tokens: list[Token], names: dict[str, str]) -> None:
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            text = inline.content.replace("`", "")
            token.attrs["id"] = names[_anchor(inline)]
            if re.fullmatch(r"Npu\w+", text) and inline.children:
                # An alert's own name, too: Grafana's links cannot turn it into lower case.
                anchor = Token("html_inline", "", 0, content=f'<span id="{text}"></span>')
                inline.children.insert(0, anchor)


def _turn_links(tokens: list[Token], anchors: set[str], names: dict[str, str]) -> None:
    """Links within the runbook stay; of others the words do: their pages are not here."""
    for token in tokens:
        open_ = None
        for child in token.children or ():
            if child.type == "link_open":
                _, _, anchor = unquote(str(child.attrs["href"])).partition("#")
                anchor = names.get(anchor, anchor)
                open_ = child if anchor in anchors else None
                child.attrs = {"href": f"#{anchor}"} if open_ else {}
                child.tag = "a" if open_ else "em"
            elif child.type == "link_close":
                child.tag = "a" if open_ else "em"


if __name__ == "__main__":
    write()
