"""The service account of the agent's Pod: a token that the kubelet replaces in its file."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Annotated

import msgspec

from npu_agent import files
from npu_agent.kube.credentials import Credentials, CredentialsError, checked
from npu_agent.text import one_line
from npu_agent.typedjson import decode

DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LONGEST = 2**16
"""Bytes; tokens have about 1,000."""


def trust_only_the_cluster() -> None:
    """Makes the cluster's CA OpenSSL's only default authority, where this is a Pod.

    By SSL_CERT_FILE, unless it is set, before aiohttp is imported: that makes two TLS contexts with
    all authorities of the system, 1.7 MB and 0.1 s for nothing.
    """
    if _server(DIRECTORY / "token"):
        os.environ.setdefault("SSL_CERT_FILE", str(DIRECTORY / "ca.crt"))


async def load() -> Credentials | None:
    """The service account's credentials; None: no Pod, or it has none.

    Raises:
        CredentialsError: its token cannot be used.
    """
    token = DIRECTORY / "token"
    server = _server(token)
    if server is None:
        return None
    try:
        text = (await files.read(token, _LONGEST)).decode("ascii")
    except (OSError, ValueError) as error:
        raise CredentialsError(
            f"the service account's token {token} cannot be read: {one_line(error)}",
            "check that the Pod's volume mount has it and that this user may read it",
        ) from error
    return Credentials(
        server=server,
        source=f"the service account ({token})",
        authorization=checked(f"Bearer {text.strip()}", f"the service account's token {token}"),
        rotates=True,
        ca=str(DIRECTORY / "ca.crt"),
        node=node_of(text),
    )


class _Name(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9.-]+\Z")]


class _Bound(msgspec.Struct):
    node: _Name


class _Claims(msgspec.Struct):
    bound: _Bound = msgspec.field(name="kubernetes.io")


def node_of(token: str) -> str | None:
    """The Node of the Pod that a token is bound to, unverified; None: it does not say.

    Format: a JWT with private claims (k8s.io/kubernetes, pkg/serviceaccount/claims.go). They name
    the node from Kubernetes 1.30 on.
    """
    try:
        payload = base64.urlsafe_b64decode(token.split(".")[1] + "==")
        return decode(payload, _Claims).bound.node.name
    except (IndexError, ValueError):
        return None


def _server(token: Path) -> str | None:
    """The API server's URL; None: no Pod with a service account."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    if not (host and port and os.path.lexists(token)):
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
