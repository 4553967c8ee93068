"""Address and credentials for the API server, from any source."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from npu_agent.kube.errors import ApiError, Kind
from npu_agent.text import one_line


class CredentialsError(ApiError):
    """There are no usable credentials; the message names those that were tried."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy, kind=Kind.CREDENTIALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The address, identity and trust for connections to the API server."""

    server: str
    source: str
    """Where all this comes from, for messages."""
    authorization: str | None = field(default=None, repr=False)
    """The header of that name."""
    rotates: bool = False
    """Whether `authorization` is replaced on disk without notice."""
    ca: str | None = None
    """A file with certificate authorities; None: the system's."""
    certificate: str | None = None
    """A file."""
    key: str | None = None
    """A file; None: it is in that of the certificate."""
    verify: bool = True
    server_name: str | None = None
    """The name in the server's certificate, if not that of the URL."""
    proxy: str | None = None
    """Its URL."""
    namespace: str = "default"
    """Where a person's commands look, if they name none."""
    impersonated: tuple[tuple[str, str], ...] = ()
    """Headers by which another user is asked for."""
    node: str | None = None
    """The Node of the Pod that they are bound to; None: of none."""

    @property
    def proxy_address(self) -> str | None:
        """The proxy without scheme, name and password, for messages."""
        return self.proxy and self.proxy.rpartition("://")[2].rpartition("@")[2]


def checked(authorization: str, source: str) -> str:
    """A header that is good to send: a line's end in it would begin another one.

    Raises:
        CredentialsError: there is no token in it, or more than a token.
    """
    scheme, _, secret = authorization.strip().partition(" ")
    if not secret:
        raise CredentialsError(f"{source}: the token is empty", "restart the Pod, or log in again")
    if not (secret.isascii() and secret.isprintable()):
        raise CredentialsError(f"{source}: the token is more than one line of plain characters")
    return f"{scheme} {secret}"


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """How to speak TLS; reads files, up to 0.3 s for the system's authorities.

    Raises:
        CredentialsError: a file with a certificate or key is missing or damaged.
    """
    try:
        context = ssl.create_default_context(cafile=credentials.ca)
        if credentials.certificate:
            context.load_cert_chain(credentials.certificate, credentials.key)
    except OSError as error:
        named = (credentials.ca, credentials.certificate, credentials.key)
        files = " and ".join(filter(None, named)) or "the certificate authorities of this system"
        why = "not PEM, or damaged" if isinstance(error, ssl.SSLError) else one_line(error)
        raise CredentialsError(
            f"{credentials.source}: {files} cannot be used ({why})",
            "a Pod has the cluster's ca.crt from the ConfigMap kube-root-ca.crt, a kubeconfig "
            "names it as certificate-authority",
        ) from error
    if not credentials.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # CAs that lack an extension which Go does not ask for are common, and Python 3.13 refuses them.
    # The chain, the host name and the dates are still checked.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
