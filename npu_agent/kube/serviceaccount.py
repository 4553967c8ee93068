"""The service account of the agent's Pod: a token that the kubelet replaces in its file."""

from __future__ import annotations

import os
from pathlib import Path

from npu_agent import files
from npu_agent.kube.credentials import Credentials, CredentialsError, checked
from npu_agent.text import one_line

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
            "does the volume mount of the Pod have it, and may this user read it?",
        ) from error
    return Credentials(
        server=server,
        source=f"the service account ({token})",
        authorization=checked(f"Bearer {text.strip()}", f"the service account's token {token}"),
        rotates=True,
        ca=str(DIRECTORY / "ca.crt"),
    )


def _server(token: Path) -> str | None:
    """The API server's URL; None: no Pod with a service account."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    if not (host and port and os.path.lexists(token)):
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
