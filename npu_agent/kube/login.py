"""Runs the login program of a kubeconfig (`exec`), and kills it if it hangs.

Format: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npu_agent.kube.credentials import CredentialsError
from npu_agent.text import one_line, reason, shown

_LARGEST = 2**20
"""Bytes of its answer; a token has about 1,000."""
_KILLED = 1.0
"""Seconds that its end may take after it was killed."""


@dataclass(frozen=True, slots=True)
class Login:
    """What a login program answers; at least one of token and certificate."""

    token: str | None = field(repr=False)
    certificate: str | None = None
    """PEM."""
    key: str | None = field(default=None, repr=False)
    """PEM, of the certificate."""


async def login(
    program: Sequence[str], env: Mapping[str, str], version: str, *, source: str, deadline: float
) -> Login:
    """Runs a login program; it never outlives this call.

    Args:
        program: it and its arguments.
        env: its environment.
        version: the apiVersion that the kubeconfig gives it, and that it has to answer with.
        source: where it is named, for messages.
        deadline: seconds that it may take.

    Raises:
        CredentialsError: it cannot be started, does not end in time, fails, or gives none.
    """
    named = f"{source} cannot be used: its login program {shown(program[0], 200)}"
    asked = {"apiVersion": version, "kind": "ExecCredential"}
    info = json.dumps({**asked, "spec": {"interactive": sys.stdout.isatty()}})
    try:
        async with asyncio.timeout(deadline):
            code, out, err = await _run(program, {**env, "KUBERNETES_EXEC_INFO": info})
    except TimeoutError as error:
        raise CredentialsError(
            f"{named} has not ended within {deadline:g} s",
            "run it by hand: does it wait for input, or for a network that is away?",
        ) from error
    except (OSError, ValueError) as error:  # a NUL in an argument
        raise CredentialsError(
            f"{named} cannot be started: {one_line(reason(error))}", "install it, or check PATH"
        ) from error
    if code:
        said = f": {one_line(err.decode(errors='replace'))}" if err.strip() else ""
        raise CredentialsError(f"{named} ended with {code}{said}", "log in again, by hand")
    try:
        return _login(json.loads(out), asked)
    except (ValueError, RecursionError) as error:
        raise CredentialsError(
            f"{named} gives an answer that cannot be used: {one_line(error)}",
            "does kubectl work with it?",
        ) from error


def _login(answer: object, asked: Mapping[str, str]) -> Login:
    found = answer if isinstance(answer, dict) else {}
    if {key: found.get(key) for key in asked} != asked:
        raise ValueError(f"it is no {asked['kind']} of {asked['apiVersion']}")
    status = found.get("status")
    if not isinstance(status, dict):
        raise ValueError("it has no status")  # noqa: TRY004
    names = ("token", "clientCertificateData", "clientKeyData")
    token, certificate, key = (status.get(name) or None for name in names)
    if not all(text is None or isinstance(text, str) for text in (token, certificate, key)):
        raise ValueError("token, certificate and key have to be texts")
    if not token and not (certificate and key):
        raise ValueError("there is neither a token, nor a certificate with its key")
    return Login(token, certificate, key if certificate else None)


class _Ear(asyncio.SubprocessProtocol):
    """Keeps what a process writes."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.said = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See asyncio."""
        self.said[fd] += data[: _LARGEST - len(self.said[fd])]

    def connection_lost(self, _: Exception | None) -> None:
        """See asyncio: it has ended, and its pipes are closed."""
        self.ended.set()


async def _run(program: Sequence[str], env: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a process that is killed when this is cancelled.

    Not by `asyncio.create_subprocess_exec`: a process that it has started goes on, and one that
    has given its pipes to a child of its own cannot be waited for.
    """
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(_Ear, *program, env=env, stdin=None)
    )
    try:
        transport, ear = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio leaves pipes open if it is cancelled while it starts a process, for milliseconds.
        await _end(*await starting)
        raise
    try:
        await ear.ended.wait()
        return transport.get_returncode() or 0, bytes(ear.said[1]), bytes(ear.said[2])
    finally:
        await _end(transport, ear)


async def _end(transport: asyncio.SubprocessTransport, ear: _Ear) -> None:
    """Kills it if it runs, and closes its pipes."""
    transport.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILLED):
            await ear.ended.wait()
