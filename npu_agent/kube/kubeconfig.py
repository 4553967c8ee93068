"""Credentials of a kubeconfig, by kubernetes_asyncio: contexts, login programs, certificates.

For the commands that people run, and for hosts without a service account. Importing the library
takes half a second and 37 MB (all of Kubernetes' models), so this module is imported only when
there is a kubeconfig to load; in the agent's Pod there is none.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import yaml
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config.exec_provider import ExecProvider
from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from npu_agent import files
from npu_agent.kube.credentials import Credentials, CredentialsError, checked
from npu_agent.kube.login import login
from npu_agent.kube.proxy import proxy_for
from npu_agent.text import one_line
from npu_agent.threads import DaemonThread, within

_DEADLINE = 5.0
"""Seconds for reading the files."""
_LONGEST = 1 << 16
"""Bytes of a token."""


async def load(paths: str, *, deadline: float) -> Credentials:
    """The credentials of a kubeconfig's current context; may run a login program.

    Args:
        paths: with a colon between two, as in $KUBECONFIG.
        deadline: seconds that the login program may take.

    Raises:
        CredentialsError: it cannot be used.
    """
    source = f"the kubeconfig {paths}"
    made = Configuration()
    made.host = ""
    try:
        thread = DaemonThread("npu-kubeconfig")
        merged = await thread.call(lambda: _merged(paths), deadline=_DEADLINE)
        loader = KubeConfigLoader(config_dict=merged, config_base_path=None)
        user = _user(merged)
        if user is not None:
            await _read_token(user)
            await _log_in(user, source, deadline)
        async with within(deadline):  # it may ask an OIDC provider for a new token
            await loader.load_and_set(made)
    except CredentialsError:
        raise
    except Exception as error:  # the library has no error of its own for a malformed file
        raise CredentialsError(
            f"{source} cannot be used: {one_line(error)}", "does kubectl work with it?"
        ) from error
    if not made.host:
        raise CredentialsError(f"{source} cannot be used: its cluster has no server")
    token = made.api_key.get("BearerToken")
    return Credentials(
        server=made.host,
        source=source,
        authorization=checked(token, source) if token else None,
        ca=made.ssl_ca_cert,
        certificate=made.cert_file,
        key=made.key_file,
        verify=made.verify_ssl,
        server_name=made.tls_server_name,
        proxy=made.proxy or proxy_for(made.host),
    )


def _merged(paths: str) -> Any:
    """What the library makes of the files; it fails in Python's words at a file of another shape.

    Raises:
        CredentialsError: one of them is no kubeconfig.
        OSError, yaml.YAMLError: one cannot be read.
    """
    for each in filter(None, paths.split(os.pathsep)):
        file = Path(os.path.expanduser(each))  # noqa: PTH111 (Path's raises for a user without a home)
        if file.exists():
            with file.open() as opened:
                if wrong := _misshapen(yaml.safe_load(opened)):
                    raise CredentialsError(
                        f"the kubeconfig {file} cannot be used: {wrong}",
                        "log in to the cluster to have it written, or set KUBECONFIG to another "
                        "file",
                    )
    return KubeConfigMerger(paths).config


def _misshapen(content: object) -> str | None:
    """What keeps this from being a kubeconfig, as far as its shape goes."""
    if content is None:
        return "it is empty"
    if not isinstance(content, dict):
        return "it has to be a map with clusters, contexts and users"
    for key in ("clusters", "contexts", "users"):
        each = content.get(key) or []
        if not isinstance(each, list) or not all(isinstance(i, dict) and "name" in i for i in each):
            return f"{key} has to be a list of maps, each with a name"
    return None


def _user(config: Any) -> Any:
    """The user of the current context; None if it has none.

    Raises:
        ConfigException: there is no such user or context.
    """
    context = config["contexts"].get_with_name(config["current-context"])["context"]
    name = context.safe_get("user")  # kubectl writes "" where there is none
    return config["users"].get_with_name(name)["user"] if name else None


async def _read_token(user: Any) -> None:
    """Puts the token of a user in place of its file's name.

    The library would read the file on the event loop, for as long as that takes.

    Raises:
        OSError, ValueError: it cannot be read, or is no token.
    """
    if "tokenFile" in user and "token" not in user:
        file = Path(user.path).parent / user["tokenFile"]
        content = await files.read(file, _LONGEST, deadline=_DEADLINE)
        user.value["token"] = content.decode("ascii").strip()


async def _log_in(user: Any, source: str, deadline: float) -> None:
    """Puts what the login program of a user answers in its place.

    The library would run it too, and let it go on when nobody waits for it any more: one that hangs
    would be started again at each try, and all of them would stay.

    Raises:
        CredentialsError: see `login`.
        ConfigException: it is not described as it has to be.
    """
    if "exec" not in user or "auth-provider" in user:
        return
    program = ExecProvider(user["exec"])
    version = str(program.api_version)
    found = await login(program.args, program.env, version, source=source, deadline=deadline)
    del user.value["exec"]
    if found.token:
        user.value["token"] = found.token
    if found.certificate and found.key:
        for key, pem in (("certificate", found.certificate), ("key", found.key)):
            user.value[f"client-{key}-data"] = base64.b64encode(pem.encode()).decode()
