"""The status page: the state of the agent as one HTML document that needs nothing else.

Made for an engineer on call at night: the first line says whether all is well, and if not, what
is wrong. Works without JavaScript (the page then reloads itself), on a phone and in dark mode.
Jinja2 renders the templates, and escapes all that they print. What comes from outside goes through
the filter `text`, too. Slow to import: `Server` does it on a thread.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from npu_agent.core.comparison import plain as spelled
from npu_agent.core.state import AgentState, is_fenced
from npu_agent.outputs.web import words
from npu_agent.outputs.web.status import iso
from npu_agent.outputs.web.view import HIGH, MOST, WIDE, PageView, Tracks
from npu_agent.text import middle
from npu_agent.wording import LANGUAGES, Writer

_HERE = Path(__file__).parent
_STYLE = Markup((_HERE / "page.css").read_text(encoding="utf-8"))  # noqa: S704
_SCRIPT = Markup((_HERE / "page.js").read_text(encoding="utf-8"))  # noqa: S704


def _steps(language: str) -> str:
    """The runbook, made with the wheel: a checkout that was never installed has none."""
    made = _HERE / f"runbook.{language}.html"
    if not made.exists():
        return "<p>python docs/runbook.py makes this page.</p>"
    return made.read_text(encoding="utf-8")


_STEPS = {language: Markup(_steps(language)) for language in LANGUAGES}  # noqa: S704


def _digest(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = (
    "default-src 'none'; "
    f"style-src 'sha256-{_digest(_STYLE)}'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: nothing but the style and the script that it brings."""

_BUILD = hashlib.sha256((_STYLE + _SCRIPT).encode()).hexdigest()[:12]


environment = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
environment.globals.update(
    _=words.words,
    ngettext=words.counted,
    HIGH=HIGH,
    MOST=MOST,
    UNKNOWN=words.UNKNOWN,
    WHOLE=words.WHOLE,
    WIDE=WIDE,
)
environment.filters.update(
    figure=words.figure,
    iso=iso,
    middle=middle,
    plain=words.plain,
    prose=words.prose,
    span=words.span,
    spelled=spelled,
    text=words.text,
)
environment.tests["fenced"] = is_fenced
for name in environment.list_templates():
    environment.get_template(name)


def page(state: AgentState, history: Tracks, language: str = "en") -> str:
    """The document; `history` gives a card's last hour by the card's ID."""
    assets = {"build": _BUILD, "style": _STYLE, "script": _SCRIPT}
    view = PageView(state, history, language)
    return _render("page.html", language, state=state, view=view, writer=Writer(language), **assets)


def runbook(language: str = "en") -> str:
    """Renders the runbook that problems link to, in one of `LANGUAGES`."""
    return _render("runbook.html", language, style=_STYLE, steps=_STEPS[language])


def _render(name: str, language: str, **values: object) -> str:
    with words.in_language(language):
        return environment.get_template(name).render(language=language, **values)
