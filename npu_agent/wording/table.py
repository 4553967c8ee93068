"""The form of a language's table of words: ``en.json``, ``ko.json``, ``ja.json``.

Start here to translate. A row or field that a translation lacks is English.
"""

from __future__ import annotations

import msgspec

from npu_agent.core.hardware import Cause
from npu_agent.core.state import SessionPhase


class Sentences(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words for a kind of message.

    Fields are the facts, the `cards` and `pods` of the message; the first `card`; of an unhealthy
    card's cause `remedy` and `shared`; and `names`, which are the cards or, where they are too
    many, their number. ``{cards:is|are}`` is the first word for a single card or for "true", else
    the second one.
    """

    headline: str
    """In short: ``{cards} {cards:is|are} hot``."""
    detail: tuple[str, ...] = ()
    """What follows the headline, each after a colon; those that are empty are left out."""
    remedy: str = ""
    """Imperatives; a command stands between backticks. Empty: the text has it."""
    held: str = ""
    """The remedy if Pods hold the cards; empty: the same."""
    unready: str = ""
    """Why the agent is not ready, in place of the headline; empty: as the headline says."""
    waits: str = ""
    """What is not done while the API server does not answer, as a clause."""


class CauseWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words for a cause of an unhealthy card."""

    means: str
    """A clause with the card as its subject, or about it: ``it is too hot``."""
    remedy: str
    shared: str
    """What it is most likely where every card of the node has this cause."""


class Language(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table of one language."""

    messages: dict[str, Sentences]
    """By kind: a `core.kinds.Kind` or `Clause`, or a `core.timeline.EntryKind`."""
    causes: dict[Cause, CauseWords]
    phases: dict[SessionPhase, str]
    parts: dict[str, str]
    """What sentences are put together with.

    ``again``: as the phase ``registering``, if it was registered before. ``more``: the end of a
    list that is cut, of `names` and `count`. ``count``: in the field `names`, cards that are too
    many to name. ``used``: the end of a `text`, with the `pods` that use the cards. ``quoted``:
    plain words (`means`), and those of driver or probe (`reason`). And ``colon``, ``semicolon``,
    ``comma``.
    """
