"""The status page: the state of the agent as one HTML document that needs nothing else. Pure.

Made for an engineer on call at night: the first line says whether all is well, and if not, what
is wrong. Works without JavaScript (the page then reloads itself), on a phone and in dark mode.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path

from markupsafe import Markup

from npu_agent.core.state import AgentState
from npu_agent.outputs.web.view import PageView, Tracks
from npu_agent.outputs.web.words import LANGUAGES

_HERE = Path(__file__).parent
_STYLE = Markup((_HERE / "page.css").read_text())  # noqa: S704
_SCRIPT = Markup((_HERE / "page.js").read_text())  # noqa: S704


def _steps(language: str) -> str:
    """The runbook, made with the wheel: a checkout that was never installed has none."""
    made = _HERE / f"runbook.{language}.html"
    return made.read_text() if made.exists() else "<p>python docs/runbook.py makes this page.</p>"


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


def page(state: AgentState, history: Tracks, language: str = "en") -> str:
    """The document; `history` gives a card's last hour by the card's ID."""
    from npu_agent.outputs.web.render import render

    assets = {"build": _BUILD, "style": _STYLE, "script": _SCRIPT}
    return render("page.html", language, state=state, view=PageView(state, history), **assets)


def runbook(language: str = "en") -> str:
    """Renders the runbook that problems link to, in one of `LANGUAGES`."""
    from npu_agent.outputs.web.render import render

    return render("runbook.html", language, style=_STYLE, steps=_STEPS[language])
