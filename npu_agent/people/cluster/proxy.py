"""The API server through a person's own kubectl: `kubectl proxy` on a socket of this command alone.

So each kubeconfig means what it means to kubectl: contexts, `as`, login programs, proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.credentials import CredentialsError, at, own_namespace
from npu_agent.kube.request import Request
from npu_agent.text import one_line, shown

_LOGIN = 300.0
"""Seconds for the first answer: a login program of the kubeconfig may ask the person."""
_START = 60.0
"""Seconds for kubectl to start: gcloud's asks the server for its version before."""
_CONTEXT = (
    '{.contexts[0].name}{"\\n"}{.clusters[0].cluster.server}{"\\n"}{.contexts[0].context.namespace}'
)
"""What is asked of the kubeconfig, a line each; a context's name may itself have several lines."""
_GUARD = 'trap "" HUP INT TERM; read line || kill $(cat /proc/$1/task/*/children) $1'
_TRY = "try `kubectl version` with the same options"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What a person's kubectl acts on."""

    context: str = ""
    """Of the kubeconfig; "": there is none, as in a Pod."""
    server: str = "the API server"
    """Its URL."""
    namespace: str = "default"
    """The one that commands are about, if they name none."""

    def __str__(self) -> str:
        """Describes it for people."""
        if not self.context:
            return "no context"
        return f"context {shown(self.context)} ({shown(self.server)})"


@contextlib.asynccontextmanager
async def through_kubectl(
    flags: Sequence[str], *, asks: bool = True
) -> AsyncIterator[tuple[Api, Login]]:
    """Runs `kubectl proxy`, and yields the API server that it leads to.

    Args:
        flags: of kubectl, such as ``--context=test``.
        asks: whether a login program may ask the person, on this terminal.

    Raises:
        ApiError: kubectl is missing, or does not reach the API server.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise CredentialsError(
            "kubectl is not in PATH, and this command reaches the API server through it",
            "install it; for k3s or MicroK8s make a link named kubectl to theirs",
        )
    place = await _place(program, flags)
    with tempfile.TemporaryDirectory(prefix="npu-") as directory:
        socket = Path(directory, "api")
        command = [program, "proxy", f"--unix-socket={socket}", *flags]
        if place.server.partition("://")[2].partition("/")[2]:  # as Rancher has
            command.append("--append-server-path")
        process = await _started(*command, asks=asks)
        guard = await _guarded(process.pid)
        source = f"your kubectl, {place}"
        api = Api(lambda: at("http://localhost", source, socket=socket, name=place.server))
        try:
            await _until_served(process)
            await _until_answered(api)
            yield api, place
        finally:
            _end(process.pid)  # first: another signal ends what awaits
            await api.close()
            await _until_ended(process)
            await guard.communicate(b"\n")


async def _place(program: str, flags: Sequence[str]) -> Login:
    """Where kubectl finds no context it has the Pod's account, or says later what is wrong."""
    command = (program, "config", "view", "--minify", f"--output=jsonpath={_CONTEXT}", *flags)
    view = await _started(*command, asks=False)
    try:
        async with asyncio.timeout(_START):
            printed, _ = await view.communicate()
        context, server, namespace = printed.decode().rsplit("\n", 2)
    except (TimeoutError, ValueError):
        with contextlib.suppress(ProcessLookupError):
            view.kill()
        await _until_ended(view)
        return Login(namespace=own_namespace() or "default")
    return Login(context=context, server=server, namespace=namespace or "default")


async def _started(*command: str, asks: bool) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=None if asks else DEVNULL,
            stdout=PIPE,
            stderr=None if asks else DEVNULL,
        )
    except OSError as error:
        raise CredentialsError(
            f"{command[0]} cannot be run ({one_line(error)})", "install kubectl again"
        ) from error


async def _guarded(pid: int) -> Process:
    """Starts what ends a process, and what it runs, if this one ends without a word.

    After SIGKILL its pipe is at its end: a proxy would live on with a person's credentials.
    """
    return await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", _GUARD, "sh", str(pid), stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
    )


async def _until_served(process: Process) -> None:
    """Waits for the line that `kubectl proxy` prints when it listens."""
    assert process.stdout  # noqa: S101  (for the type checker)
    try:
        async with asyncio.timeout(_START):
            async for line in process.stdout:
                if b"Starting to serve" in line:
                    return
            what = f"it ended with {await process.wait()}"
    except TimeoutError:
        what = f"it was not ready within {_START:g} s"
    raise CredentialsError(f"`kubectl proxy` does not start: {what}", _TRY)


async def _until_answered(api: Api) -> None:
    """Waits for any answer of the API server: what it says matters to the requests that follow."""
    try:
        await api.ask(Request("get", "APIVersions", object), deadline=_LOGIN)
    except ApiError as error:
        if error.kind is ErrorKind.SERVER:  # kubectl itself answers so where there is no way
            raise ApiError(error.what, _TRY, kind=error.kind, status=error.status) from error
        if error.kind in (ErrorKind.UNAUTHORIZED, ErrorKind.UNREACHABLE, ErrorKind.TIMEOUT):
            raise


def end_children(pid: int) -> None:
    """Ends what a process runs, and what that runs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text(encoding="utf-8").split():
                _end(int(child))


def _end(pid: int) -> None:
    """Ends a process and what it runs: a kubectl may be a script that runs the real one."""
    end_children(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


async def _until_ended(process: Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.communicate()  # to the end of its pipe: nothing of it is left open
