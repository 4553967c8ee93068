"""Where the API server is and who we are: read from disk, at each connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_agent.kube import lean
from npu_agent.kube.errors import one_line
from npu_agent.kube.proxy import proxy_for

if TYPE_CHECKING:
    from kubernetes_asyncio.client.configuration import Configuration

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD = 60.0
"""Seconds until the token is read again. The kubelet puts a new one there long before the old one
ends, so that a 401 is rare; client-go waits as long."""


class CredentialsError(Exception):
    """There are none that can be used; the message says which were tried, and the remedy."""


async def configuration(kubeconfig: Path | None) -> tuple[Configuration, str]:
    """What to connect with, and its source for messages.

    By precedence: `kubeconfig`; inside a Pod its service account; the files of $KUBECONFIG;
    ~/.kube/config.

    Raises:
        CredentialsError: see there.
    """
    made, source = await (_default() if kubeconfig is None else _given(kubeconfig))
    if "BearerToken" in made.api_key:
        made.api_key["BearerToken"] = _checked(made.api_key["BearerToken"], source)
    made.proxy = made.proxy or proxy_for(str(made.host))
    return made, source


async def _given(kubeconfig: Path) -> tuple[Configuration, str]:
    found = await _of_kubeconfig(str(kubeconfig))
    if found is None:
        raise CredentialsError(f"the kubeconfig {kubeconfig} is missing: give another one")
    return found, f"the kubeconfig {kubeconfig}"


async def _default() -> tuple[Configuration, str]:
    token = SERVICE_ACCOUNT / "token"
    server, paths = await asyncio.to_thread(_places, token)
    if server:
        return await _of_service_account(server, token), f"the service account ({token})"
    if found := await _of_kubeconfig(paths):
        return found, f"the kubeconfig {paths}"
    raise CredentialsError(
        f"no credentials for the API server: there is neither a service account ({token}, and "
        f"KUBERNETES_SERVICE_HOST and _PORT in the environment) nor a kubeconfig ({paths}): in a "
        "Pod mount its token as k8s/daemonset.yaml does, elsewhere set KUBECONFIG, or do without "
        "by labels.output: none and events: false"
    )


def _places(token: Path) -> tuple[str | None, str]:
    """The API server's URL if this is a Pod with a service account, and the kubeconfig's paths."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    server = None
    if host and port and os.path.lexists(token):
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    # Not Path.expanduser, which raises for a user without a home.
    return server, os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")  # noqa: PTH111


async def _of_service_account(server: str, token: Path) -> Configuration:
    made = await _new()
    made.host = server
    made.ssl_ca_cert = str(token.with_name("ca.crt"))
    made.api_key["BearerToken"] = await asyncio.to_thread(_bearer, token)
    made.refresh_api_key_hook = _rereading(token)
    return made


def _rereading(token: Path) -> Callable[[Any], Awaitable[None]]:
    read_at = time.monotonic()

    async def refresh(configuration: Any) -> None:
        nonlocal read_at
        if time.monotonic() - read_at < _REREAD:
            return
        read_at = time.monotonic()
        # The one we have may still be good; if not, the 401 has all read again, and tells of it.
        with contextlib.suppress(CredentialsError):
            configuration.api_key["BearerToken"] = await asyncio.to_thread(_bearer, token)

    return refresh


def _bearer(token: Path) -> str:
    try:
        text = token.read_text("ascii")
    except (OSError, ValueError) as error:
        raise CredentialsError(
            f"the service account's token {token} cannot be read: {one_line(error)}: does the "
            "volume mount of the Pod have it, and may this user read it?"
        ) from error
    return _checked(f"Bearer {text.strip()}", f"the service account's token {token}")


def _checked(authorization: str, source: str) -> str:
    """As it goes into a header, which must not be broken by a line's end."""
    scheme, _, secret = authorization.strip().partition(" ")
    if not secret:
        raise CredentialsError(f"{source}: the token is empty: restart the Pod, or log in again")
    if not (secret.isascii() and secret.isprintable()):
        raise CredentialsError(f"{source}: the token is more than one line of plain characters")
    return f"{scheme} {secret}"


async def _of_kubeconfig(paths: str) -> Configuration | None:
    """None if no file is there.

    Args:
        paths: with a colon between two, as in $KUBECONFIG.
    """
    if not await asyncio.to_thread(_any_exists, paths):
        return None
    made = await _new()
    made.host = ""
    try:
        merged = await asyncio.to_thread(_merged, paths)
        # Not on a thread: it may run a login program, whose wait has to be cancellable.
        loader = _kube_config().KubeConfigLoader(config_dict=merged, config_base_path=None)
        await loader.load_and_set(made)
    except Exception as error:  # the library has no error of its own for a malformed file
        raise CredentialsError(
            f"the kubeconfig {paths} cannot be used: {one_line(error)}: does kubectl work with it?"
        ) from error
    if not made.host:
        raise CredentialsError(f"the kubeconfig {paths} cannot be used: its cluster has no server")
    return made


def _any_exists(paths: str) -> bool:
    return any(os.path.exists(os.path.expanduser(p)) for p in paths.split(os.pathsep) if p)  # noqa: PTH110, PTH111


def _merged(paths: str) -> Any:
    return _kube_config().KubeConfigMerger(paths).config


def _kube_config() -> Any:
    return lean.module("kubernetes_asyncio.config.kube_config")


async def _new() -> Configuration:
    module = await asyncio.to_thread(lean.module, "kubernetes_asyncio.client.configuration")
    made: Configuration = module.Configuration()
    return made


def certificates_error(made: Configuration, source: str, error: OSError) -> CredentialsError:
    """What to say when an SSL context cannot be made of the files that `made` names."""
    files = " and ".join(filter(None, (made.ssl_ca_cert, made.cert_file, made.key_file)))
    why = "not PEM, or damaged" if isinstance(error, ssl.SSLError) else one_line(error)
    return CredentialsError(
        f"{source}: {files or 'the certificate authorities of this system'} cannot be used "
        f"({why}): a Pod has the cluster's ca.crt from the ConfigMap kube-root-ca.crt, a "
        "kubeconfig names it as certificate-authority"
    )
