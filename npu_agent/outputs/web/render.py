"""Renders the templates by Jinja2. Slow to import: `Server` does it on a thread.

All that a template prints is escaped. What comes from outside goes through the filter `text`, too.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from npu_agent.core.advice import plain_reason
from npu_agent.core.comparison import plain as spelled
from npu_agent.core.state import is_fenced
from npu_agent.outputs.web import markup
from npu_agent.outputs.web.curves import HIGH, WIDE
from npu_agent.outputs.web.status import iso
from npu_agent.outputs.web.view import MOST
from npu_agent.outputs.web.words import in_language, translate_clauses

environment = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
environment.globals.update(
    _=markup.words,
    ngettext=markup.counted,
    HIGH=HIGH,
    MOST=MOST,
    UNKNOWN=markup.UNKNOWN,
    WHOLE=markup.WHOLE,
    WIDE=WIDE,
)
environment.filters.update(
    clauses=translate_clauses,
    figure=markup.figure,
    iso=iso,
    plain=markup.plain,
    prose=markup.prose,
    reason=plain_reason,
    span=markup.span,
    spelled=spelled,
    text=markup.text,
)
environment.tests["fenced"] = is_fenced
for name in environment.list_templates():
    environment.get_template(name)


def render(name: str, language: str, **values: object) -> str:
    """Renders a template in one of `LANGUAGES`."""
    with in_language(language):
        return environment.get_template(name).render(language=language, **values)
