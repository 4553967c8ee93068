"""Address and credentials for the API server, as kubernetes_asyncio reads them.

To be called on a thread: the library takes 0.3 s to import, and a file may hang. CAs may lack an
extension that Go does not ask for, and Python 3.13 does: they are common, so that is not checked.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.text import one_line
from npu_agent.typedjson import decode

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The service account of a Pod: a token, which the kubelet replaces, and the cluster's CA."""
REREAD = 60.0
"""Seconds until the token is read again, as in client-go: long before it expires."""


class CredentialsError(ApiError):
    """There are no usable credentials; the message names those that were tried."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy, kind=ErrorKind.CREDENTIALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The library's configuration, and what it does not have."""

    configuration: Configuration
    source: str
    """Where all this comes from, for messages."""
    node: str | None = None
    """The Node of the Pod that they are bound to; None: of none."""
    socket: Path | None = None
    """The socket of a proxy that has the credentials; None: the server is asked itself."""
    good_for: float = math.inf
    """Seconds until they are to be loaded again."""
    name: str = ""
    """What the server is called in messages; "": its URL."""

    @property
    def server(self) -> str:
        return self.name or str(self.configuration.host)


def load() -> Credentials:
    """Returns the service account's credentials in a Pod, else those of the kubeconfig.

    Raises:
        CredentialsError: there are none, or they cannot be used.
    """
    if in_pod():
        return of_pod()
    paths = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")  # noqa: PTH111 (Path's raises without a home)
    if any(os.path.exists(path) for path in paths.split(os.pathsep) if path):  # noqa: PTH110
        return of_kubeconfig(paths)
    raise CredentialsError(
        "no credentials for the API server: there is neither a service account "
        f"({DIRECTORY / 'token'}, and KUBERNETES_SERVICE_HOST and _PORT in the environment) nor a "
        f"kubeconfig ({paths})",
        "in a Pod mount its token as k8s/daemonset.yaml does, elsewhere set KUBECONFIG, or set "
        "labels.output: none, events: false and cordon: false",
    )


def at(url: str, source: str, **more: Any) -> Credentials:
    """Returns those for a server that asks for none: a proxy, or a stand-in."""
    from kubernetes_asyncio.client import Configuration

    return Credentials(configuration=Configuration(host=url), source=source, **more)


def in_pod() -> bool:
    """Whether this is a Pod with a service account."""
    address = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    return all(map(os.environ.get, address)) and os.path.lexists(DIRECTORY / "token")


def own_namespace() -> str:
    """The namespace of this Pod; "": it has no service account."""
    try:
        return (DIRECTORY / "namespace").read_text(encoding="utf-8")
    except OSError:
        return ""


def trust_only_the_cluster() -> None:
    """In a Pod: else the import of aiohttp reads all authorities of the system (1.7 MB)."""
    if in_pod():
        os.environ.setdefault("SSL_CERT_FILE", str(DIRECTORY / "ca.crt"))


def of_pod() -> Credentials:
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import ConfigException, load_incluster_config

    token = DIRECTORY / "token"
    ca = DIRECTORY / "ca.crt"
    configuration = Configuration()
    configuration.disable_strict_ssl_verification = True
    try:
        # Not by its own refresh, which reads the file on the event loop.
        load_incluster_config(  # type: ignore[no-untyped-call]
            configuration, False, token_filename=str(token), cert_filename=str(ca)
        )
    except (ConfigException, OSError, ValueError) as error:
        raise CredentialsError(
            f"the service account ({token}, {ca}) cannot be used: {one_line(error)}",
            "check that the Pod's volume mount has both files and that this user may read them; "
            "the ConfigMap kube-root-ca.crt has the CA",
        ) from error
    header = configuration.api_key["BearerToken"] = configuration.api_key["BearerToken"].strip()
    source = f"the service account ({token})"
    node = node_of(header)
    return Credentials(configuration=configuration, source=source, node=node, good_for=REREAD)


def of_kubeconfig(paths: str) -> Credentials:
    """For developers: people's commands ask through kubectl."""
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import load_kube_config

    source = f"the kubeconfig {paths}"
    configuration = Configuration()
    configuration.disable_strict_ssl_verification = True
    try:
        asyncio.run(
            load_kube_config(paths, client_configuration=configuration, persist_config=False)
        )
    except Exception as error:  # the library has no error of its own for a malformed file
        raise CredentialsError(
            f"{source} cannot be used: {one_line(f'{type(error).__name__}: {error}')}",
            "check it with kubectl, log in again, or set KUBECONFIG to another file",
        ) from error
    return Credentials(configuration=configuration, source=source)


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
