import asyncio
import errno
import fcntl
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_agent import logs

STAMP = len("2025-01-02T03:04:05.678Z ")


class Stderr:
    """What was written to stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text

    def clear(self) -> None:
        self._capsys.readouterr()
        self._text = ""


@pytest.fixture(autouse=True)
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Stderr]:
    """What is logged; the loggers are as before afterwards."""
    root = logging.getLogger()
    loggers = [root, logging.getLogger("grpclib"), logging.getLogger("asyncio")]
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    yield Stderr(capsys)
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


log = logs.logger("npu_agent.test")


def text(stderr: Stderr) -> str:
    """The one line of the text form, without its time."""
    line = stderr.getvalue()
    assert line.endswith("\n")
    return line[STAMP:-1]


def parsed(stderr: Stderr) -> dict[str, Any]:
    """The one line of the JSON form."""
    (line,) = stderr.getvalue().removesuffix("\n").split("\n")
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("npu0", "npu0"),
        (None, "None"),
        ("", '""'),
        ("two words", '"two words"'),
        ('a "quote"', r'"a \"quote\""'),
        ("a=b", '"a=b"'),
        ("온도", "온도"),
        ("a\nlevel=error b", r'"a\nlevel=error b"'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ("\u202eright to left", r'"\u202eright to left"'),
        ("\udcff", r'"\udcff"'),
        (OSError(5, "Input/output error", "/sys/x"), "\"[Errno 5] Input/output error: '/sys/x'\""),
    ],
)
def test_values_in_text(stderr: Stderr, value: object, shown: str) -> None:
    logs.setup()
    log.info("card added", card="npu0", value=value)
    assert text(stderr) == f"info    card added card=npu0 value={shown}"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.sampled_from(["text", "json"]))
def test_no_value_makes_a_second_line_or_reaches_the_terminal(
    stderr: Stderr, value: str, form: logs.Format
) -> None:
    stderr.clear()
    logs.setup(form=form)
    log.info("card added", value=value)
    line = stderr.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    line.encode()  # a file takes it, whatever it is
    if form == "json":
        assert parsed(stderr)["value"] == value


def test_json(stderr: Stderr) -> None:
    logs.setup(form="json")
    log.warning("card unhealthy", card="npu0", reason="온도\n", count=3, error=OSError("gone"))
    found = parsed(stderr)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "message": "card unhealthy",
        "logger": "npu_agent.test",
        "card": "npu0",
        "reason": "온도\n",
        "count": 3,
        "error": "gone",
    }


def test_a_field_does_not_displace_those_of_every_line(stderr: Stderr) -> None:
    logs.setup(form="json")
    log.info("card added", time="never", message="forged", logger="x", exception="y", name="z")
    found = parsed(stderr)
    assert (found["message"], found["logger"]) == ("card added", "npu_agent.test")
    assert (found["field_time"], found["field_message"]) == ("never", "forged")
    assert (found["field_logger"], found["exception"], found["name"]) == ("x", "y", "z")


@pytest.mark.parametrize("form", ["text", "json"])
def test_exceptions_come_with_their_traceback(stderr: Stderr, form: logs.Format) -> None:
    logs.setup(form=form)
    try:
        int("disk on fire")
    except ValueError:
        log.exception("a part failed", part="inventory")
    if form == "json":
        found = parsed(stderr)
        assert (found["level"], found["part"]) == ("error", "inventory")
        trace = found["exception"]
    else:
        first, trace = stderr.getvalue().split("\n", 1)
        assert first[STAMP:] == "error   a part failed part=inventory"
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "ValueError: invalid literal for int() with base 10: 'disk on fire'" in trace


def test_the_level_may_change_while_it_runs(stderr: Stderr) -> None:
    logs.setup("warning")
    log.info("not this")
    logs.setup("debug", "json")
    log.debug("this", n=1)
    assert parsed(stderr)["message"] == "this"
    assert len(logging.getLogger().handlers) == 1


@pytest.mark.parametrize(
    ("name", "level", "heard"),
    [
        ("grpclib.server", logging.WARNING, False),
        ("grpclib.server", logging.ERROR, True),
        ("asyncio", logging.DEBUG, False),
        ("asyncio", logging.INFO, True),
    ],
)
def test_libraries_are_heard_when_something_is_wrong(
    stderr: Stderr, name: str, level: int, heard: bool
) -> None:
    logs.setup("debug")
    logging.getLogger(name).log(level, "hello")
    assert bool(stderr.getvalue()) is heard


def test_asyncio_reports_what_it_cannot_accept_once_a_minute(
    stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.setup()
    now = 100.0
    monkeypatch.setattr("npu_agent.logs.time.monotonic", lambda: now)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(logs.LoopErrors())
    error = OSError(errno.EMFILE, "Too many open files")
    for _ in range(1000):
        loop.call_exception_handler(
            {"message": "socket.accept() failed", "exception": error, "socket": object()}
        )
    assert stderr.getvalue().count("cannot accept connections") == 1
    now += 61.0
    loop.call_exception_handler(
        {"message": "socket.accept() failed", "exception": error, "socket": object()}
    )
    assert "left_out=999" in stderr.getvalue()
    assert "Traceback" not in stderr.getvalue()
    for _ in range(2):  # all else is reported as ever
        loop.call_exception_handler({"message": "never retrieved", "exception": error})
    assert stderr.getvalue().count("never retrieved") == 2
    loop.close()


def test_a_log_without_a_reader_stops_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 16384)
    with (
        os.fdopen(writer, "w", encoding="utf-8") as unread,
        os.fdopen(reader, encoding="utf-8") as late,
    ):
        monkeypatch.setattr(sys, "stderr", unread)
        logs.setup()
        for number in range(100):
            log.info("x" * 3000, number=number)
        read = os.read(late.fileno(), 100_000).decode()
        assert 3000 < len(read) <= 16384
        assert "number=0" in read
        log.info("read again")
        read = os.read(late.fileno(), 100_000).decode()
    assert "info    read again\n" in read
    assert "warning log lines were dropped because no process reads the log lines=9" in read


def test_a_line_that_was_cut_ends_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with (
        os.fdopen(writer, "w", encoding="utf-8") as unread,
        os.fdopen(reader, encoding="utf-8") as late,
    ):
        monkeypatch.setattr(sys, "stderr", unread)
        logs.setup(form="json")
        log.info("x" * 3900, more="y" * 3900)
        cut = os.read(late.fileno(), 100_000).decode()
        log.info("next")
        read = cut + os.read(late.fileno(), 100_000).decode()
    whole = [line for line in read.splitlines() if line.endswith("}")]
    assert [json.loads(line)["message"] for line in whole][:1] == ["next"]


def test_a_line_that_was_dropped_whole_leaves_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with (
        os.fdopen(writer, "w", encoding="utf-8") as unread,
        os.fdopen(reader, encoding="utf-8") as late,
    ):
        monkeypatch.setattr(sys, "stderr", unread)
        logs.setup(form="json")
        for number in range(100):
            log.info("x" * 500, number=number)
        read = os.read(late.fileno(), 100_000).decode()
        log.info("read again")
        read += os.read(late.fileno(), 100_000).decode()
    messages = [json.loads(line)["message"] for line in read.splitlines()]
    assert messages[-1] == "read again"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_is_bounded_whatever_is_in_it(stderr: Stderr, form: logs.Format) -> None:
    """An annotation may have 256 KiB, and an error that quotes it as many."""
    logs.setup(form=form)
    huge = "begin" + "x" * 262_144 + "end"
    error = ValueError(huge)
    log.error(huge, reason=error, value=huge, exc_info=error)
    line = stderr.getvalue()
    assert len(line) < 50_000
    assert line.count("begin") >= 3
    assert line.count("xend") >= 3


def test_a_failure_is_logged_when_its_reason_changes_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    reporter = logs.Reporter(logs.logger("some"), "cannot", "can again", what="labels")
    reporter.works()
    for reason in ("one", "one", OSError("two"), "one"):
        reporter.failed(reason)
        assert reporter.reason == str(reason)
    reporter.works()
    reporter.works()
    assert reporter.reason is None
    said = [(r.message, getattr(r, "fields", {}).get("reason")) for r in caplog.records]
    assert said == [("cannot", "one"), ("cannot", "two"), ("cannot", "one"), ("can again", None)]
