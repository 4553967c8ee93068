"""The runbook that the agent serves beside its status page, made of two pages of docs/.

Whoever reads the status page through a port-forward, in a cluster without the internet or with an
older agent, gets the steps for the very agent that is asked.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = Path(__file__).parent
FILE = DOCS.parent / "npu_agent/outputs/web/runbook.html"
_PAGES = ("alerts.md", "troubleshooting.md")
_MARK = re.compile(r"<!-- .* -->\n")
"""What encloses a part of a page that is made from something else: docs/parts.py."""


def runbook() -> str:
    """The HTML fragment."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    made = [parser.parse(_MARK.sub("", (DOCS / name).read_text())) for name in _PAGES]
    for tokens in made:
        _name_headings(tokens)
    anchors = {str(token.attrs["id"]) for tokens in made for token in tokens if "id" in token.attrs}
    for tokens in made:
        _turn_links(tokens, anchors)
    return "".join(
        f"<article>\n{parser.renderer.render(tokens, parser.options, {})}</article>\n"
        for tokens in made
    )


def _name_headings(tokens: list[Token]) -> None:
    """Gives each heading its anchor, as GitHub does, so that links of docs/ are right here too."""
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            text = inline.content.replace("`", "")
            token.attrs["id"] = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            if re.fullmatch(r"Npu\w+", text) and inline.children:
                # An alert's own name, too: Grafana's links cannot turn it into lower case.
                anchor = Token("html_inline", "", 0, content=f'<span id="{text}"></span>')
                inline.children.insert(0, anchor)


def _turn_links(tokens: list[Token], anchors: set[str]) -> None:
    """Links within the runbook stay; of others the words do: their pages are not here."""
    for token in tokens:
        open_ = None
        for child in token.children or ():
            if child.type == "link_open":
                _, _, anchor = str(child.attrs["href"]).partition("#")
                open_ = child if anchor in anchors else None
                child.attrs = {"href": f"#{anchor}"} if open_ else {}
                child.tag = "a" if open_ else "em"
            elif child.type == "link_close":
                child.tag = "a" if open_ else "em"
