"""What an HTTP status, or an exception on the way, is made of: kind, words and remedy."""

from __future__ import annotations

import ssl

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.kube.credentials import at
from npu_agent.kube.errors import ErrorKind, answered, failed, retry_after
from npu_agent.kube.request import Request

HERE = at("https://a", "the service account (/token)")
GET = Request(verb="get", kind="Node", name="n1", answer=object)
RBAC = 'nodes "n1" is forbidden: User "bob" cannot get resource "nodes" at the cluster scope'
POLICY = "nodes \"n1\" is forbidden: ValidatingAdmissionPolicy 'own-node' denied request: not yours"
NO_DRA = "DRA needs Kubernetes 1.34"


def body(message: str) -> bytes:
    return b'{"kind": "Status", "message": "%s"}' % message.replace('"', '\\"').encode()


@pytest.mark.parametrize(
    ("status", "message", "kind", "words"),
    [
        (400, "bad", ErrorKind.REFUSED, ["answered 400 Bad Request (bad): check admission"]),
        (
            401,
            "Unauthorized",
            ErrorKind.UNAUTHORIZED,
            ["it does not accept the service account (/token), as just", "expired"],
        ),
        (
            403,
            RBAC,
            ErrorKind.FORBIDDEN,
            ['User "bob"', "no right to get nodes: `npu-agent doctor`"],
        ),
        (403, POLICY, ErrorKind.FORBIDDEN, ["own-node", "not RBAC's refusal"]),
        (404, 'nodes "n1" not found', ErrorKind.NOT_FOUND, ["set NODE_NAME to", "spec.nodeName"]),
        (409, "uid mismatch", ErrorKind.CONFLICT, ["uid mismatch", "the agent reads it again"]),
        (429, "too many requests", ErrorKind.TOO_MANY, ["429", "the agent retries"]),
        (500, "no leader", ErrorKind.SERVER, ["500", "no leader", "log of the API server"]),
        (599, "what", ErrorKind.SERVER, ["answered 599 (what)"]),
        (302, "", ErrorKind.GARBAGE, ["302 Found: no redirect is followed", "log in again"]),
    ],
)
def test_statuses(status: int, message: str, kind: ErrorKind, words: list[str]) -> None:
    error = answered(GET, status, {}, body(message), HERE)
    assert (error.kind, error.status, error.retry_after) == (kind, status, None)
    for word in ["cannot get Node n1: https://a answered", *words]:
        assert word in str(error)


@pytest.mark.parametrize(
    ("verb", "kind", "words"),
    [
        ("get", "ResourceClaim", "the claim was deleted"),
        ("list", "ResourceSlice", NO_DRA),
        ("create", "TokenReview", "check that this is a Kubernetes API server"),
    ],
)
def test_a_404_names_the_missing_object_or_api(verb: str, kind: str, words: str) -> None:
    request = Request(verb=verb, kind=kind, answer=object)
    assert words in answered(request, 404, {}, b"404 page not found", HERE).remedy


def test_an_apply_needs_the_right_to_patch() -> None:
    request = Request(verb="apply", kind="ResourceSlice", name="s", answer=object)
    said = str(answered(request, 403, {}, body(RBAC), HERE))
    assert "cannot apply ResourceSlice s: " in said
    assert "no right to patch resourceslices" in said


def test_a_redirect_says_where_it_leads() -> None:
    location = "https://login\x1b[2J.example/" + "x" * 1000
    said = str(answered(GET, 307, {"Location": location}, b"", HERE))
    assert "307 Temporary Redirect that leads to https://login?[2J.example/xx" in said
    assert len(said) < 1000


def test_a_proxys_page_is_words() -> None:
    page = b"<html><body><h1>Bad\n Gateway</h1>" + b"spam " * 10_000
    error = answered(GET, 502, {}, page, HERE)
    assert "502 Bad Gateway (Bad Gateway spam spam" in str(error)
    assert len(str(error)) < 1000


@given(st.integers(300, 999).filter(lambda s: s != 401), st.binary() | st.text().map(str.encode))
def test_any_answer_is_an_error_with_one_line(status: int, body: bytes) -> None:
    error = answered(GET, status, {}, body, None)
    assert error.status == status
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (" 12 ", 12.0),
        ("3600", 30.0),
        ("9" * 400, None),
        ("-1", None),
        ("٣", None),
        ("Tue, 14 Nov 2023 22:13:50 GMT", None),
    ],
)
def test_retry_after(value: str | None, expected: float | None) -> None:
    assert retry_after(value) == expected


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        aiohttp.ClientPayloadError("Response payload is not completed"),
        OSError(5, "Input/output error"),
        ssl.SSLError(1, "wrong version number"),
    ],
)
def test_anything_else_is_unreachable_and_says_why(error: Exception) -> None:
    found = failed(GET, error, HERE)
    assert found.kind is ErrorKind.UNREACHABLE
    assert str(found).startswith("cannot get Node n1: https://a: ")
