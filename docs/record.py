"""Records the tour for the READMEs: `make recording`, or `python -m docs.record` at the root.

It runs `npu-agent demo --once` on a terminal and writes what that printed as an SVG that moves by
CSS alone: no script, nothing from elsewhere, its own background in light and dark. Directories,
ports and names that differ from run to run are those of the golden tour
(tests/people/commands/tour.py), and the pace is that of a reader: the same tour makes the same
files. The second file is a still, for readers who want no motion: a Pod gets its NPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path

from tests.people.commands.tour import comparable
from tests.terminal import npu_agent

_IMAGES = Path(__file__).parent / "images"
MOVING, STANDING = _IMAGES / "demo.svg", _IMAGES / "demo-still.svg"
_COMMAND = ("demo", "--once")

_COLUMNS, _ROWS = 100, 27
_CELL, _LINE = 8.43, 19
"""Pixels: the width of a letter of 14 pixels, and the height of a row."""
_EDGE, _BAR = 16, 34
"""Pixels: around the text, and of the window's title."""
_STILL = "5. "
"""The step that the still ends with."""

_ROW_SECONDS = 0.1
_STEP_SECONDS = 1.0
"""How long a reader has for a step, and for each of its rows beside that."""
_END_SECONDS = 3.0

_STYLE = """
svg{--back:#fff;--line:#d0d7de;--bar:#f6f8fa;--text:#1f2328;--dim:#59636e;--good:#1a7f37}
@media(prefers-color-scheme:dark){
svg{--back:#0d1117;--line:#3d444d;--bar:#151b23;--text:#f0f6fc;--dim:#9198a1;--good:#3fb950}}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",
monospace;fill:var(--text);white-space:pre}
.bold{font-weight:700}.good{fill:var(--good)}.dim{fill:var(--dim)}
.back{fill:var(--back)}.bar{fill:var(--bar)}.line{fill:none;stroke:var(--line)}
"""

_TITLE = "npu-agent demo: the agent on simulated NPUs"
_ABOUT = (
    "A terminal in which npu-agent registers with a stand-in for the kubelet, lists two cards, "
    "labels the node, gives a Pod its NPU, reports cards that are drained, fail and recover, "
    "rejects an invalid config, registers again after a kubelet restart, and offers cards by DRA."
)


@dataclass(frozen=True)
class Run:
    """Some letters of one look, and the column where they begin."""

    column: int
    text: str
    look: str = ""
    """A class of the style sheet."""


Row = tuple[Run, ...]
Moment = tuple[float, int]
"""A second, and how many rows there are from then on."""


def recorded() -> str:
    """What the command prints on a terminal.

    Raises:
        RuntimeError: a step of the tour did not happen.
    """
    with npu_agent(*_COMMAND, columns=_COLUMNS, lines=_ROWS) as terminal:
        if code := terminal.ended():
            raise RuntimeError(f"the tour ended with exit code {code}: {terminal.output[-800:]}")
        return comparable(terminal.output.replace("\r\n", "\n"))


def rows(output: str) -> Iterator[Row]:
    """The rows of the terminal, below the command that was typed; an empty one has no runs."""
    yield (Run(0, "$", "good"), Run(2, f"npu-agent {' '.join(_COMMAND)}", "bold"))
    yield ()
    for line in output.strip("\n").split("\n"):
        plain = re.sub(r"\033\[\d*m", "", line)
        if "\033[1m" in line:
            yield (Run(0, plain, "bold"),)
        elif match := re.fullmatch(r"( +)✔( +)(.+)", plain):
            column = match.start(3)
            first, *rest = _wrapped(match[3], _COLUMNS - column)
            yield (Run(len(match[1]), "✔", "good"), Run(column, first))
            yield from ((Run(column, each),) for each in rest)
        else:
            yield from ((Run(0, each),) if each else () for each in _wrapped(plain, _COLUMNS))


def _wrapped(text: str, columns: int) -> Iterator[str]:
    """The text in rows, each broken at a space where there is one in its second half."""
    while len(text) > columns:
        end = text.rfind(" ", columns // 2, columns + 1)
        end = end if end > 0 else columns
        yield text[:end]
        text = text[end:].lstrip(" ")
    yield text


def paced(screen: Sequence[Row]) -> tuple[list[Moment], float]:
    """When each row appears, and how many seconds all of it takes.

    A step comes row by row, then there is time to read it.
    """
    moments, second = [], 0.0
    for count, row in enumerate(screen, 1):
        if row:
            moments.append((second, count))
            second += _ROW_SECONDS
        else:
            second += _STEP_SECONDS
    return moments, second + _END_SECONDS


def moving(screen: Sequence[Row]) -> str:
    """The SVG of all of it; the still where the style sheet's motion is not followed."""
    moments, seconds = paced(screen)
    still = _still(screen)

    def keyframes(shift: Callable[[int], int]) -> str:
        return "".join(
            f"{100 * second / seconds:.2f}%{{transform:translateY({shift(count)}px)}}"
            for second, count in moments
        )

    motion = f"""\
.up{{transform:translateY({_up(still)}px)}}
.hide{{transform:translateY({_below(still)}px)}}
@media(prefers-reduced-motion:no-preference){{
.up{{animation:up {seconds:.1f}s step-end infinite}}
.hide{{animation:hide {seconds:.1f}s step-end infinite}}}}
@keyframes up{{{keyframes(_up)}}}
@keyframes hide{{{keyframes(_below)}}}
"""
    # What is not there yet is behind a rectangle, which moves down row by row.
    hide = f'<rect class="back hide" width="100%" height="{_below(len(screen))}"/>'
    return _window(f'<g class="up">\n{_lines(screen)}\n{hide}\n</g>', motion)


def standing(screen: Sequence[Row]) -> str:
    """The SVG of one screen."""
    still = _still(screen)
    return _window(_lines(screen[max(0, still - _ROWS) : still]), "")


def _window(content: str, style: str) -> str:
    """A terminal with this in it."""
    width, inner = ceil(_COLUMNS * _CELL) + 2 * _EDGE, _ROWS * _LINE
    height = _BAR + inner + 2 * _EDGE
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img" xml:space="preserve" aria-labelledby="title about">
<title id="title">{escape(_TITLE)}</title>
<desc id="about">{escape(_ABOUT)}</desc>
<style>{_STYLE}{style}</style>
<rect class="back" width="{width}" height="{height}" rx="8"/>
<path class="bar" d="M0 {_BAR}V8a8 8 0 0 1 8-8H{width - 8}a8 8 0 0 1 8 8V{_BAR}z"/>
<text class="dim" x="{width // 2}" y="22" text-anchor="middle">{escape(_TITLE)}</text>
<svg x="{_EDGE}" y="{_BAR + _EDGE}" width="{width - 2 * _EDGE}" height="{inner}">
{content}
</svg>
<path class="line" d="M0 {_BAR}H{width}"/>
<rect class="line" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>
</svg>
"""


def _lines(screen: Sequence[Row]) -> str:
    return "\n".join(
        f'<text class="row" y="{_below(number) + 14}">{"".join(map(_run, row))}</text>'
        for number, row in enumerate(screen)
        if row
    )


def _run(run: Run) -> str:
    look = f' class="{run.look}"' if run.look else ""
    x = round(run.column * _CELL, 2)
    return f'<tspan x="{x:g}"{look}>{escape(run.text, quote=False)}</tspan>'


def _still(screen: Sequence[Row]) -> int:
    """How many rows there are at the end of the step that the still shows."""
    first = next(at for at, row in enumerate(screen) if row and row[0].text.startswith(_STILL))
    return screen.index((), first)


def _below(count: int) -> int:
    """Pixels: where the row below this many begins."""
    return count * _LINE


def _up(count: int) -> int:
    """Pixels by which the text is moved when it has this many rows: the last one is in sight."""
    return -_below(max(0, count - _ROWS))


def main() -> int:
    """Writes the pictures."""
    screen = tuple(rows(recorded()))
    MOVING.write_text(moving(screen), encoding="utf-8")
    STANDING.write_text(standing(screen), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
