"""Errors of the API server in one form: what failed, and the remedy.

`answered` is for an HTTP status, `failed` for an exception on the way.
"""

from __future__ import annotations

import enum
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from http.client import responses
from typing import TYPE_CHECKING, Any

import msgspec

from npu_agent.text import one_line
from npu_agent.typedjson import InvalidJsonError, decode

if TYPE_CHECKING:
    from npu_agent.core.state import ApiState
    from npu_agent.kube.credentials import Credentials
    from npu_agent.kube.request import Request

LONGEST_WAIT = 30.0
"""Seconds: a Retry-After beyond it is a mistake, or a proxy's page for maintenance. The server may
be well again long before, and nothing is followed until then."""
IS_IT_KUBERNETES = "check that this is a Kubernetes API server, and not a proxy's page"


class ErrorKind(enum.Enum):
    """Kinds of errors, as far as the remedy depends on them."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMEOUT = "timeout"
    """No answer, or not all of it, before the deadline."""
    CREDENTIALS = "credentials"
    """No usable credentials on disk, or an invalid certificate of the API server."""
    GARBAGE = "garbage"
    """An answer that is not an object of the kind asked for."""
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    UNRELATED = "unrelated"
    """Read as a Node: no Pod of that Node uses it, or it is gone."""
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    TOO_MANY = "too_many"
    SERVER = "server"
    REFUSED = "refused"
    """The other statuses, by `_BY_STATUS`; this one is any other 4xx."""


_UNKNOWN = (
    "start a new Pod, or log in again: it does not accept {source}, as just read from disk: the "
    "token has expired, its ServiceAccount was deleted or the Pod belongs to another cluster"
)
_NO_RIGHT = (
    "{source} has no right to {verb} {resource}: `npu-agent doctor` shows the command that "
    "restores it"
)
_AS_NODE = (
    "add the components impersonation and eviction (Helm: rbac.mode impersonation, eviction true) "
    "on Kubernetes 1.36 or later"
)
NOT_RBAC = "that is not RBAC's refusal: see the admission policy or webhook it names"
_NO_DRA = "it does not serve resource.k8s.io/v1: DRA needs Kubernetes 1.34 or later"
_NO_RELATION = "no relationship found between node"
"""In the Node authorizer's refusals (k8s.io/kubernetes, plugin/pkg/auth/authorizer/node)."""
_UNRELATED = "it was deleted, or no Pod of this node uses it: a Node may read no other"
_NOT_FOUND = {
    "Node": (
        "set NODE_NAME to the name that `kubectl get nodes` shows; k8s/daemonset.yaml takes it "
        "from spec.nodeName"
    ),
    "ResourceClaim": "the claim was deleted",
    "ResourceSlice": _NO_DRA,
}
TOO_LONG = {
    "ResourceSlice": (
        "delete those that npu-agent has not made: `kubectl get resourceslices "
        "--field-selector spec.nodeName=NODE,spec.driver=DRIVER`"
    )
}
"""The remedy for a list that is longer than anything of ours, by kind."""
_BY_STATUS = {
    401: (ErrorKind.UNAUTHORIZED, _UNKNOWN),
    403: (ErrorKind.FORBIDDEN, _NO_RIGHT),
    404: (ErrorKind.NOT_FOUND, f"check the path in its URL, and {IS_IT_KUBERNETES}"),
    409: (
        ErrorKind.CONFLICT,
        "it was changed, deleted or created again meanwhile; the agent reads it again",
    ),
    429: (ErrorKind.TOO_MANY, "it is overloaded; the agent retries later"),
}
"""The kind and the remedy of each status, for `str.format`."""
_BY_CLASS = {
    3: (
        ErrorKind.GARBAGE,
        f"no redirect is followed, as rights would go with it: {IS_IT_KUBERNETES}, or log in again",
    ),
    4: (ErrorKind.REFUSED, "check admission policies, and whether its version knows this"),
    5: (ErrorKind.SERVER, "check the log of the API server, or of a proxy before it"),
}
_OTHERS = (ErrorKind.GARBAGE, IS_IT_KUBERNETES)


@dataclass(eq=False)
class ApiError(Exception):
    """A call to the API server failed; ``str(error)`` is `what` and the remedy in one line."""

    what: str
    """What was tried, and what came back."""
    remedy: str = ""
    """Empty where `what` has it all."""
    _: KW_ONLY
    kind: ErrorKind
    status: int | None = None
    """Of HTTP; None: no answer."""
    retry_after: float | None = None
    """Seconds to wait, as the server asks, 30 at most."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """What the server says in detail, by kind: ``{"DisruptionBudget": "..."}``."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, self.remedy)))


def unusable(request: Request[Any], error: ValueError) -> ApiError:
    """An answer lacks a field, or has one in another form."""
    why = f"the API server's answer cannot be used: {error}"
    return ApiError(f"cannot {request}: {why}", kind=ErrorKind.GARBAGE)


class _Cause(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct, frozen=True):
    causes: tuple[_Cause, ...] = ()


class _Status(msgspec.Struct, frozen=True):
    """Kubernetes' answer to what it refuses (k8s.io/apimachinery, meta/v1)."""

    kind: str
    message: str = ""
    details: _Details = _Details()


def server(credentials: Credentials | None) -> str:
    return credentials.server if credentials else "the API server"


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header, 30 at most; None: none, or a date."""
    if value is None or not re.fullmatch(r"[0-9]{1,20}", value.strip(), re.ASCII):
        return None
    return min(float(value), LONGEST_WAIT)


def answered(
    request: Request[Any],
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    credentials: Credentials | None,
) -> ApiError:
    """Returns the error for a status other than 2xx; the beginning of the body is enough."""
    causes: dict[str, str] = {}
    try:
        decoded = decode(body, _Status)
        said = one_line(decoded.message)
        causes = {cause.reason: one_line(cause.message) for cause in decoded.details.causes}
    except InvalidJsonError:  # a proxy's page
        said = one_line(re.sub(r"<[^>]*(>|$)", " ", body[:2000].decode("utf-8", "replace")))
    what = f"cannot {request}: {server(credentials)} answered {status} {responses.get(status, '')}"
    what = what.rstrip()
    what += f" ({said})" if said else ""
    if location := headers.get("Location"):
        what += f" that leads to {one_line(location)}"
    kind, remedy = _BY_STATUS.get(status) or _BY_CLASS.get(status // 100) or _OTHERS
    if kind is ErrorKind.NOT_FOUND:
        remedy = _NOT_FOUND.get(request.kind, remedy)
    if kind is ErrorKind.FORBIDDEN and _NO_RELATION in said:
        kind = ErrorKind.UNRELATED
        remedy = _UNRELATED
    elif kind is ErrorKind.FORBIDDEN and said and "cannot" not in said:
        remedy = NOT_RBAC
    source = credentials.source if credentials else "this account"
    verb = "patch" if request.verb == "apply" else request.verb
    remedy = remedy.format(source=source, verb=verb, resource=request.resource)
    wait = retry_after(headers.get("Retry-After"))
    return ApiError(what, remedy, kind=kind, status=status, retry_after=wait, causes=causes)


def not_as_node(request: Request[Any], reads: ApiState | None) -> ApiError:
    """It was not sent, as the agent cannot act as its Node here."""
    why = reads.refusal if reads else "only the token of a Pod names a Node"
    return ApiError(f"cannot {request} as the Node: {why}", _AS_NODE, kind=ErrorKind.FORBIDDEN)


def bad_certificate(error: OSError, credentials: Credentials) -> ApiError:
    """A file with a certificate or key is missing or damaged."""
    of = credentials.configuration
    files = " and ".join(filter(None, (of.ssl_ca_cert, of.cert_file, of.key_file)))
    why = "not PEM, or damaged" if isinstance(error, ssl.SSLError) else one_line(error)
    return ApiError(
        f"{credentials.source}: {files or 'the CAs of this system'} cannot be used ({why})",
        "a Pod has the cluster's ca.crt from the ConfigMap kube-root-ca.crt, a kubeconfig names it "
        "as certificate-authority",
        kind=ErrorKind.CREDENTIALS,
    )


def failed(request: Request[Any], error: Exception, credentials: Credentials | None) -> ApiError:
    """Returns the error for an exception on the way; the words are the library's."""
    import aiohttp

    source = credentials.source if credentials else "the credentials"
    kind = ErrorKind.UNREACHABLE
    why = one_line(error) or type(error).__name__
    remedy = "check the server and its port, the network, DNS and proxies on the way"
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=cause):
            kind = ErrorKind.CREDENTIALS
            why = f"its certificate is not valid ({one_line(cause)})"
            ca = credentials and credentials.configuration.ssl_ca_cert
            remedy = (
                f"check that {ca or 'an authority that this system trusts'} signed it: use the CA "
                "of this cluster, check this host's clock, set the kubeconfig's tls-server-name to "
                "the name that is in it, and check for a proxy that intercepts TLS"
            )
        case aiohttp.ClientResponseError():
            kind = ErrorKind.GARBAGE
            remedy = IS_IT_KUBERNETES
            why = f"does not speak HTTP ({one_line(error.message or error)})"
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            kind = ErrorKind.CREDENTIALS
            why = "that is not a URL of a server"
            remedy = f"check {source}"
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorDNSError():
            pass  # whose words are good
        case aiohttp.ClientConnectorError(os_error=OSError(errno=int(number))):
            why = f"no connection ({os.strerror(number)})"  # asyncio's own words say less
        case ValueError():
            kind = ErrorKind.CREDENTIALS
            why = f"the token of {source} cannot be sent ({why})"
            remedy = "restart the Pod, or log in again"
    return ApiError(f"cannot {request}: {server(credentials)}: {why}", remedy, kind=kind)
