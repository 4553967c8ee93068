"""Logging: an event in plain words plus key=value fields, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import math
import select
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    import asyncio
    from collections.abc import MutableMapping

Format = Literal["text", "json"]

_SELDOM = 60.0
"""Seconds."""
_PIECE = 1024
"""Characters, 4096 bytes at most: as many fit into any pipe that poll says can be written to."""
_LONGEST = 4_000
"""Characters of a message or a field."""
_LONGEST_TRACE = 20_000
"""Characters of a traceback."""
_PATIENCE = 100
"""Milliseconds that the log may stop the event loop, once, where it is not read."""


class Logger(logging.LoggerAdapter[logging.Logger]):
    """Takes fields as keyword arguments: ``log.info("card added", card="npu0")``."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Moves the fields to where the formatters find them."""
        standard = {
            k: kwargs.pop(k) for k in ("exc_info", "stack_info", "stacklevel") if k in kwargs
        }
        return msg, {**standard, "extra": {"fields": dict(kwargs)}}


def logger(name: str) -> Logger:
    return Logger(logging.getLogger(name), {})


log = logger(__name__)


class Reporter:
    """Logs a failure when its reason changes, and the next success."""

    def __init__(self, log: Logger, failing: str, works: str = "", **fields: Any) -> None:
        """`failing` and `works` are the messages; "" is not logged. `fields` go with both."""
        self.reason: str | None = None
        """Why it failed the last time; None: it did not."""
        self._log = log
        self._failing = failing
        self._works = works
        self._fields = fields

    def failed(self, reason: object) -> None:
        words = str(reason)
        if words != self.reason:
            self._log.warning(self._failing, **self._fields, reason=words)
        self.reason = words

    def works(self) -> None:
        if self.reason is not None and self._works:
            self._log.info(self._works, **self._fields)
        self.reason = None


class LoopErrors:
    """The event loop's exception handler: asyncio's own, with a limit on connections refused.

    Without files or memory, asyncio's servers report tens of thousands of connections in seconds.
    """

    def __init__(self) -> None:
        self._left_out = 0
        self._next = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and "socket" in context:
            if (now := time.monotonic()) < self._next:
                self._left_out += 1
                return

            why = error.strerror
            left_out = self._left_out
            log.error("cannot accept connections", reason=why, left_out=left_out)
            self._next = now + _SELDOM
            self._left_out = 0
            return
        loop.default_exception_handler(context)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to stderr as long as it is read: a full pipe would stop the event loop."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._left_out = 0
        """Lines, since the pipe is full."""
        self._begun = False
        """Whether only the beginning of the last line was written."""
        self._room: select.poll | None = select.poll()
        try:
            self._room.register(sys.stderr.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # it has none where it is captured
            self._room = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self._begun:
                line = self.terminator + line
            for start in range(0, len(line), _PIECE):
                # Waits for a reader, but not again for the same one.
                patience = 0 if self._left_out else _PATIENCE
                if self._room is not None and not self._room.poll(patience):
                    self._left_out += 1
                    return
                self.stream.write(line[start : start + _PIECE])
                self.stream.flush()
                self._begun = start + _PIECE < len(line)
        except Exception:  # as every handler: what cannot be logged fails nothing
            self.handleError(record)
        if self._left_out:
            lines = self._left_out
            self._left_out = 0
            log.warning("log lines were dropped because no process reads the log", lines=lines)


def setup(level: str = "info", form: Format = "text") -> None:
    """Sends the log to stderr; called again when the config changes."""
    handler = _Stderr()
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Its own loggers report every connection; the agent logs what matters of them.
    logging.getLogger("grpclib").setLevel(logging.ERROR)
    for chatty in ("asyncio", "hpack"):  # hpack logs every header, at debug
        logging.getLogger(chatty).setLevel(max(logging.INFO, root.level))


def _stamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = f"{_stamp(record)} {record.levelname.lower():7} {_bounded(record.getMessage())}"
        line += "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        if record.exc_info:
            line += "\n" + _bounded(self.formatException(record.exc_info), _LONGEST_TRACE)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "message": _bounded(record.getMessage()),
            "logger": record.name,
        }
        if record.exc_info:
            line["exception"] = _bounded(self.formatException(record.exc_info), _LONGEST_TRACE)
        for key, value in getattr(record, "fields", {}).items():
            shown = _bounded(value) if isinstance(value, str) else value
            line[f"field_{key}" if key in line else key] = shown
        return _json(line)


def _bounded(text: str, most: int = _LONGEST) -> str:
    """The beginning and the end: foreign text may be as long as an annotation (256 KiB)."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {len(text) - most} characters … {text[-most // 2 :]}"


def _quoted(value: object) -> str:
    """A value in the text form."""
    word = _bounded(str(value))
    plain = word and word.isprintable() and not any(c in word for c in ' "=')
    return word if plain else _json(word)


def _json(value: object) -> str:
    """JSON on one line, in ASCII if it has what a terminal might obey."""

    def text(other: object) -> str:
        return _bounded(str(other))

    shown = json.dumps(value, default=text, ensure_ascii=False)
    return shown if shown.isprintable() else json.dumps(value, default=text)
