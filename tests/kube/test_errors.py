"""Retry-After, and other people's words."""

import ssl

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.kube.errors import Attempt, Kind, answered, failed, retry_after
from npu_agent.text import one_line

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT
GET = Attempt(doing="get Node n1", verb="get", resource="nodes", server="https://a")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("0", 0.0),
        ("1", 1.0),
        (" 12 ", 12.0),
        ("299", 299.0),
        ("86400", 300.0),
        ("9" * 400, 300.0),
        ("-1", None),
        ("1.5", None),
        ("nan", None),
        ("inf", None),
        ("", None),
        ("soon", None),
        ("٣", None),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tuesday, 14-Nov-23 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:13:50 -0000", 30.0),
        ("Tue, 14 Nov 2023 22:00:00 GMT", 0.0),
        ("Tue, 14 Nov 2094 22:00:00 GMT", 300.0),
        ("Tue, 99 Nov 2023 22:00:00 GMT", None),
    ],
)
def test_retry_after(value: str | None, expected: float | None) -> None:
    assert retry_after(value, NOW) == expected


@given(st.text() | st.from_regex(r"\A\w{3}, \d+ Nov \d+ \d+:\d+:\d+ [-+]?\w*\Z"))
def test_retry_after_is_bounded_whatever_comes(value: str) -> None:
    seconds = retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= 300


@given(st.text() | st.text(max_size=5).map(lambda words: words * 300))
def test_one_line_is_one_line(words: str) -> None:
    line = one_line(words)
    assert line.isprintable()
    assert len(line) <= 300


@given(st.integers(300, 999).filter(lambda s: s != 401), st.binary() | st.text().map(str.encode))
def test_any_answer_is_an_error_with_one_line(status: int, body: bytes) -> None:
    error = answered(GET, status, {}, body, "why \n not")
    assert error.status == status
    assert str(error).isprintable()


def remedy(status: int, verb: str, resource: str, *, official: bool = True) -> str:
    attempt = Attempt(doing=f"{verb} it", verb=verb, resource=resource, server="https://a")
    body = b'{"kind": "Status"}' if official else b"404 page not found"
    return answered(attempt, status, {}, body, None).remedy


@pytest.mark.parametrize(
    ("verb", "resource", "words"),
    [
        ("get", "nodes", "`npu-agent doctor` shows the command that restores it"),
        ("patch", "events", "`npu-agent doctor` shows the command that restores it"),
        ("list", "resourceslices", "`npu-agent doctor` shows the command that restores it"),
        ("get", "resourceclaims", "`npu-agent doctor` shows the command that restores it"),
        ("create", "tokenreviews", "`npu-agent doctor` shows the command that restores it"),
        ("create", "selfsubjectaccessreviews", "own ClusterRole system:basic-user gives it"),
        ("get", "/apis/resource.k8s.io/v1", "own ClusterRole system:discovery gives it"),
        ("get", "deviceclasses", "nothing in k8s/ gives it, as the agent needs none"),
        ("list", "deviceclasses", "do this as an administrator"),
    ],
)
def test_what_gives_a_right(verb: str, resource: str, words: str) -> None:
    said = remedy(403, verb, resource)
    assert f"has no right to {verb} {resource}: " in said
    assert words in said


@pytest.mark.parametrize(
    ("verb", "resource", "official", "words"),
    [
        ("get", "nodes", True, "NODE_NAME may be wrong"),
        ("patch", "events", True, "the Event has expired"),
        ("get", "resourceclaims", True, "the claim was deleted"),
        ("list", "resourceslices", False, "it does not serve resource.k8s.io/v1"),
        ("list", "deviceclasses", False, "it does not serve resource.k8s.io/v1"),
        ("get", "deviceclasses", False, "it does not serve resource.k8s.io/v1"),
        ("get", "deviceclasses", True, "there is no class of this name"),
        ("delete", "resourceslices", True, "there is no such object"),
        ("create", "selfsubjectaccessreviews", True, "it serves no reviews"),
        ("create", "tokenreviews", True, "it serves no reviews"),
        ("create", "tokenreviews", False, "is that a Kubernetes API server"),
    ],
)
def test_what_was_not_found(verb: str, resource: str, official: bool, words: str) -> None:
    said = remedy(404, verb, resource, official=official)
    assert words in said
    assert ("Event" in said) == (resource == "events")


@pytest.mark.parametrize("resource", ["nodes", "events", "resourceslices", "tokenreviews"])
def test_a_conflict_is_about_what_was_asked_for(resource: str) -> None:
    said = remedy(409, "patch", resource)
    assert ("Event" in said, "Node" in said) == (resource == "events", resource == "nodes")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (10, "this host's clock"),
        (62, "by a name that its certificate has"),
        (64, "by a name that its certificate has"),
        (20, "has not signed it"),
    ],
)
def test_bad_certificates(code: int, words: str) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    error.verify_message = "why"
    told = failed(GET, error)
    assert told.kind is Kind.CREDENTIALS
    assert "(why)" in str(told)
    assert words in str(told)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Newline or carriage return detected in headers"),
        TimeoutError(),
        ConnectionResetError(104, "Connection reset by peer"),
        aiohttp.ClientPayloadError("Response payload is not completed"),
        aiohttp.ServerDisconnectedError(),
        OSError(5, "Input/output error"),
    ],
)
def test_anything_else_is_unreachable_and_says_why(error: Exception) -> None:
    told = failed(GET, error)
    assert told.kind is Kind.UNREACHABLE
    assert str(told).startswith("cannot get Node n1: https://a: ")
