"""Credentials of a kubeconfig, by kubernetes_asyncio: contexts, login programs, certificates.

Imported only where there is a kubeconfig to load, not in the agent's Pod: the library takes half a
second and 37 MB (all of Kubernetes' models).
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException, load_kube_config

from npu_agent.kube.credentials import Credentials, CredentialsError, checked
from npu_agent.text import one_line

_THIS_HOST = ("localhost", "127.0.0.1", "::1")


def load(paths: str, context: str | None = None) -> Credentials:
    """A context's credentials, by default the current one's; blocks while a login program runs.

    `paths` are separated by colons, as in $KUBECONFIG.

    Raises:
        CredentialsError: it cannot be used.
    """
    source = f"the kubeconfig {paths}"
    found = Configuration()
    found.host = ""  # the library's default is this host
    try:
        loader = asyncio.run(
            load_kube_config(paths, context, client_configuration=found, persist_config=False),
        )
        proxy = found.proxy or _proxy(found.host)
    except Exception as error:  # the library has no error of its own for a malformed file
        plain = isinstance(error, ConfigException | OSError | ValueError | yaml.YAMLError)
        why = one_line(error if plain else f"{type(error).__name__}: {error}")
        raise CredentialsError(
            f"{source} cannot be used: {why}",
            "check it with kubectl, log in again, or set KUBECONFIG to another file",
        ) from error
    if not found.host:
        raise CredentialsError(f"{source} cannot be used: its cluster has no server")
    token = found.api_key.get("BearerToken")
    return Credentials(
        server=found.host,
        source=source,
        authorization=checked(token, source) if token else None,
        ca=found.ssl_ca_cert,
        certificate=found.cert_file,
        key=found.key_file,
        verify=found.verify_ssl,
        server_name=found.tls_server_name,
        proxy=proxy,
        namespace=(loader.current_context or {}).get("context", {}).get("namespace") or "default",
    )


def _proxy(server: str) -> str | None:
    """The proxy's URL by HTTPS_PROXY, HTTP_PROXY and NO_PROXY (names, no address ranges).

    Not by aiohttp's `trust_env`, which would also send what ~/.netrc has; raises ValueError.
    """
    url = urlsplit(server)
    host = url.hostname or ""
    proxy = getproxies().get(url.scheme)
    if not proxy or host in _THIS_HOST or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
