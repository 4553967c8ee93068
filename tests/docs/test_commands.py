"""Every `npu-agent` command in the pages is one that the real parser takes, values included."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from npu_agent import config
from npu_agent.cli.catalogue import parse
from npu_agent.vendors import SPEC

from .pages import Page, pages

_OPTION = re.compile(r"\[([^\[\]]*)\]")
_CHOICE = re.compile(r"[\w-]+(?:\|[\w-]+)+")


def commands(page: Page) -> Iterator[str]:
    """What follows `npu-agent` where a page shows a command: in a code block, or by itself."""
    for language, block in page.blocks:
        if language in ("", "sh", "console", "bash", "shell"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"(?:^|[$;] |-- |sudo |&& )npu-agent +([a-z-].*)", line):
                    yield re.split(r" [|>&#;]|  #", match[1])[0]
    for text in page.inline:
        if match := re.fullmatch(r"(?:sudo )?npu-agent +([a-z-].+)", text):
            yield match[1]


def variants(text: str) -> Iterator[str]:
    """`labels [show|clear]` is `labels`, `labels show` and `labels clear`; `a|b` is `a` and `b`."""
    if match := _OPTION.search(text):
        choices = ["", *match[1].split("|")]
    elif match := _CHOICE.search(text):
        choices = match[0].split("|")
    else:
        yield " ".join(text.split())
        return
    for choice in choices:
        yield from variants(f"{text[: match.start()]} {choice.strip()} {text[match.end() :]}")


ALL = sorted({(page.name, text) for page in pages() for text in commands(page)})


@pytest.mark.parametrize(("page", "text"), ALL, ids=lambda value: value)
def test_the_real_parser_takes_it(page: str, text: str) -> None:
    for variant in variants(text):
        given = shlex.split(variant)
        if "--version" in given or "--help" in given:
            continue
        try:
            args = parse(given)
        except SystemExit:
            pytest.fail(f"{page}: npu-agent {variant} is not a command")
        if not hasattr(args, "config_file"):
            config.from_args(args, SPEC)
