"""What can go wrong with the API server, in one shape; each with a line for people."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from urllib.parse import urlsplit

from npu_agent.text import one_line

LONGEST_WAIT = 300.0
"""Seconds: a Retry-After beyond it is a mistake, or a proxy's page for maintenance."""


_DRA = ("resourceslices", "resourceclaims")
_NO_DRA = "it does not serve resource.k8s.io/v1: DRA needs Kubernetes 1.34 or later"
_REVIEWS = ("tokenreviews", "subjectaccessreviews")


class Kind(enum.Enum):
    """What went wrong, as far as it matters for what to do about it."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMEOUT = "timeout"
    """No answer, or not all of it, before the deadline."""
    CREDENTIALS = "credentials"
    """None on disk that can be used, or a certificate of the API server that is not good."""
    UNAUTHORIZED = "unauthorized"
    """401, with credentials just read from disk."""
    FORBIDDEN = "forbidden"
    """403."""
    NOT_FOUND = "not_found"
    """404."""
    CONFLICT = "conflict"
    """409: it exists already, or is another one than it was."""
    TOO_MANY = "too_many"
    """429."""
    SERVER = "server"
    """5xx."""
    REFUSED = "refused"
    """Any other 4xx: the same again will be refused again."""
    GARBAGE = "garbage"
    """An answer that is no JSON object of the kind asked for."""


class ApiError(Exception):
    """A call to the API server failed.

    ``str(error)`` is one line: `what`, and the remedy.

    Attributes:
        what: what was tried, and what came back.
        remedy: what to do about it; empty where `what` has it all.
        kind: see Kind.
        status: the HTTP status; None if there was none.
        retry_after: the seconds to wait that the server asks for, 300 at most; None if it does not.
    """

    def __init__(
        self,
        what: str,
        remedy: str = "",
        *,
        kind: Kind,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(": ".join(filter(None, (what, remedy))))
        self.what = what
        self.remedy = remedy
        self.kind = kind
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What was tried, for messages."""

    doing: str
    """Such as ``get Node n1``."""
    verb: str
    """RBAC's word for it."""
    resource: str
    """RBAC's word for what it is done to: ``nodes`` or ``events``."""
    server: str = "the API server"
    """Its URL, once that is known."""
    source: str = "no credentials"
    """Where the credentials are from."""
    ca: str | None = None
    """The file of the certificate authority."""
    proxy: str | None = None
    """On the way to the server; without name and password."""

    def failed(
        self,
        kind: Kind,
        why: str,
        remedy: str = "",
        *,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> ApiError:
        """The error for this."""
        what = f"cannot {self.doing}: {why}"
        return ApiError(what, remedy, kind=kind, status=status, retry_after=retry_after)


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """The seconds to wait of a Retry-After header: a number of seconds, or an HTTP date.

    Args:
        value: the header; None if there is none.
        now: seconds of the wall clock; the default is now.

    Returns:
        0 to 300; None if `value` is neither.
    """
    if value is None:
        return None
    try:
        if re.fullmatch(r"\s*[0-9]+\s*", value, re.ASCII):
            seconds = float(value[:20])
        else:
            date = parsedate_to_datetime(value)
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            seconds = date.timestamp() - (time.time() if now is None else now)
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT)


def answered(
    attempt: Attempt, status: int, headers: Mapping[str, str], body: bytes, reason: str | None
) -> ApiError:
    """What an HTTP status other than 2xx means.

    Args:
        attempt: what was tried.
        status: it.
        headers: of the answer, whatever their case.
        body: the beginning of it is enough.
        reason: the words behind the status.
    """
    official, said = _said(body)
    wait = retry_after(headers.get("Retry-After"))
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = one_line(reason or "an unknown status")
    came = f"{attempt.server} answered {status} {phrase}{_leading(headers.get('Location'))}"
    if said:
        came += f" ({said})"
    for_status = {
        401: (Kind.UNAUTHORIZED, _unauthorized(attempt)),
        403: (Kind.FORBIDDEN, _forbidden(attempt, said)),
        404: (Kind.NOT_FOUND, _not_found(attempt, official)),
        409: (Kind.CONFLICT, _conflict(attempt)),
        429: (Kind.TOO_MANY, "it has too much to do; the agent retries later"),
    }
    if status in for_status:
        kind, remedy = for_status[status]
    elif status >= 500:
        kind, remedy = Kind.SERVER, "see the API server's log, or that of a proxy before it"
    elif status >= 400:
        kind, remedy = Kind.REFUSED, "an admission policy, or a version that does not know this"
    else:
        kind, remedy = Kind.GARBAGE, "is that a Kubernetes API server?"
    return attempt.failed(kind, came, remedy, status=status, retry_after=wait)


def _leading(location: str | None) -> str:
    """Where a redirect leads: the host, as what follows it may be a secret."""
    try:
        host = urlsplit(location or "").netloc.rpartition("@")[2]
    except ValueError:
        host = "a place that is no URL"
    return f", a redirect to {one_line(host)}" if host else ""


def _said(body: bytes) -> tuple[bool, str]:
    """Whether the answer is a Kubernetes Status, and the words that it has for people."""
    status: object = None
    if body.lstrip()[:1] == b"{":
        with contextlib.suppress(ValueError, RecursionError):
            status = json.loads(body)
    if isinstance(status, dict) and status.get("kind") == "Status":
        message = status.get("message")
        return True, one_line(message) if isinstance(message, str) else ""
    text = body[:2000].decode("utf-8", "replace")
    text = re.sub(
        r"<(style|script|head)\b.*?(</\1\s*>|$)|<[^>]*(>|$)",
        " ",
        text,
        flags=re.DOTALL | re.IGNORECASE,
    )
    return False, one_line(text)


def _unauthorized(attempt: Attempt) -> str:
    return (
        f"it does not know {attempt.source}, as just read from disk: the token has expired, its "
        "ServiceAccount was deleted or the Pod belongs to another cluster; a new Pod, or a new "
        "login, has new ones"
    )


def _forbidden(attempt: Attempt, said: str) -> str:
    if "cannot" not in said and said:
        return "that is not RBAC's refusal: see the admission policy or webhook it names"
    who = attempt.source
    if found := re.search(r'User "system:serviceaccount:([^":]+):([^":]+)"', said):
        who = "the service account " + "/".join(found.groups())
    elif found := re.search(r'User "([^"]+)"', said):
        who = f"the user {found[1]}"
    return f"{who} has no right to {attempt.verb} {attempt.resource}: {_giver(attempt.resource)}"


def _giver(resource: str) -> str:
    """What gives the rights to a resource."""
    if resource in ("nodes", "events", *_DRA, *_REVIEWS):
        return "`npu-agent doctor` shows the command that restores it"
    if resource == "deviceclasses":
        return "nothing in k8s/ gives it, as the agent needs none: do this as an administrator"
    role = "basic-user" if resource == "selfsubjectaccessreviews" else "discovery"
    return f"Kubernetes' own ClusterRole system:{role} gives it to all users: is it bound?"


def _not_found(attempt: Attempt, official: bool) -> str:
    resource = attempt.resource
    if resource in _DRA and attempt.verb in ("list", "watch", "patch"):
        return _NO_DRA
    if resource == "deviceclasses" and (attempt.verb == "list" or not official):
        return _NO_DRA  # for a group that it does not serve, it answers with no Status
    if not official:
        return "is that a Kubernetes API server, and is the path in its URL right?"
    if resource == "nodes":
        return (
            "NODE_NAME may be wrong: it has to be the name that `kubectl get nodes` shows, and "
            "k8s/daemonset.yaml takes it from spec.nodeName"
        )
    if resource == "events":
        return "the namespace does not exist, or the Event has expired"
    if resource == "resourceclaims":
        return "the claim was deleted"
    if resource == "deviceclasses":
        return "there is no class of this name: the component k8s/components/dra has the agent's"
    if resource.endswith("reviews"):
        return "it serves no reviews, as every Kubernetes does: is that its own API server?"
    return "there is no such object"


def _conflict(attempt: Attempt) -> str:
    if attempt.resource == "nodes":
        return "the Node was deleted or created again since it was read; it is read again"
    if attempt.resource == "events":
        return "an Event of this name exists, or its namespace is being deleted"
    return "somebody else has changed it at the same time"


def failed(attempt: Attempt, error: Exception) -> ApiError:
    """What an exception of aiohttp, ssl or the operating system means."""
    import aiohttp

    at = attempt.server
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        why, remedy = _certificate(attempt, error)
        return attempt.failed(Kind.CREDENTIALS, f"{at}: {why}", remedy)
    if isinstance(error, aiohttp.ClientProxyConnectionError | aiohttp.ClientHttpProxyError):
        status = getattr(error, "status", None)
        came = f"answered {status}" if status else one_line(getattr(error, "os_error", error))
        return attempt.failed(
            Kind.UNREACHABLE,
            f"{at}: the proxy {attempt.proxy} does not lead there ({came})",
            "should NO_PROXY name the API server's address?",
        )
    if isinstance(error, aiohttp.ClientResponseError):
        what = f"does not speak HTTP ({one_line(error.message or error)})"
        return attempt.failed(Kind.GARBAGE, f"{at} {what}", "is that a Kubernetes API server?")
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        by = f", by the proxy {attempt.proxy}" if attempt.proxy else ""
        return attempt.failed(
            Kind.CREDENTIALS,
            f"{at}{by}: that is no URL of a server",
            f"check {attempt.source}, and HTTPS_PROXY",
        )
    if isinstance(error, aiohttp.ClientConnectorSSLError | ssl.SSLError):
        why, remedy = f"no TLS connection ({one_line(error)})", "is that port one for https?"
    elif isinstance(error, aiohttp.ClientConnectorDNSError):
        why = f"its name cannot be resolved ({one_line(error.os_error)})"
        remedy = "check this host's DNS"
    elif isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own words say less
        cause = os.strerror(number) if number else one_line(error.os_error)
        why, remedy = f"no connection ({cause})", "is it up, and is the network?"
    elif isinstance(error, ConnectionError | aiohttp.ClientError):
        why = f"the connection broke ({one_line(error)})"
        remedy = "is it up, or is a proxy before it?"
    else:
        why, remedy = f"{type(error).__name__}: {one_line(error)}", ""
    return attempt.failed(Kind.UNREACHABLE, f"{at}: {why}", remedy)


def _certificate(attempt: Attempt, error: Exception) -> tuple[str, str]:
    cause = getattr(error, "certificate_error", error)
    why = one_line(getattr(cause, "verify_message", cause) or cause)
    code = getattr(cause, "verify_code", None)
    if code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
        remedy = (
            "reach it by a name that its certificate has, or give that name as the kubeconfig's "
            "tls-server-name"
        )
    elif code in (9, 10):  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
        remedy = "renew it, and check this host's clock"
    else:
        remedy = (
            f"{attempt.ca or 'no certificate authority that this system trusts'} has not signed "
            "it: take the CA of this very cluster, and check for a proxy that intercepts TLS"
        )
    return f"its certificate is not valid ({why})", remedy
