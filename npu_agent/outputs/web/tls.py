"""The certificate of the public port, followed while the agent runs: the last good one stays.

A certificate is tried out before clients see it: by a handshake in memory with one that trusts that
very certificate. It fails for what a client would refuse as well (an expired one, one that is not a
server's), and is the standard library's only way to say when a certificate expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from npu_agent import files
from npu_agent.config import TlsConfig
from npu_agent.core.state import TlsState
from npu_agent.feed import Feed
from npu_agent.logs import Reporter, logger
from npu_agent.text import one_line, reason
from npu_agent.threads import DaemonThread
from npu_agent.ticks import stamp

log = logger(__name__)

_READING = 5.0
"""Seconds for the files to be read: a file system may hang."""
_LARGEST = 1 << 20
"""Bytes of a file: a bundle of authorities may be large."""


class TlsFiles(NamedTuple):
    """The paths of certificate, key and client CA."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """Authorities of the clients; None: clients need no certificate."""


def tls_files(config: TlsConfig) -> TlsFiles | None:
    """Returns the files of the config; None: no TLS."""
    if config.cert_file is None or config.key_file is None:
        return None
    ca = config.client_ca_file
    return TlsFiles(Path(config.cert_file), Path(config.key_file), Path(ca) if ca else None)


class RefusedError(Exception):
    """The files cannot be used: what is wrong, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what
        self.remedy = remedy


class Certificates:
    """`context` is the TLS context in force, `state` how it stands."""

    def __init__(self, where: TlsFiles, interval: float = 5.0) -> None:
        self.state: Feed[TlsState] = Feed(TlsState())
        self.context: Feed[ssl.SSLContext | None] = Feed(None)
        self._where = where
        self._interval = interval
        self._thread = DaemonThread("npu-tls")
        self._contents: tuple[bytes, ...] = ()
        """Of the files whose certificate is in force."""
        self._reporter = Reporter(
            log,
            "the certificate of metrics.tls is refused; the last good one stays in force, if any",
            "the certificate of metrics.tls is good again",
        )

    async def run(self) -> None:
        while True:
            await self._check()
            await asyncio.sleep(self._interval)

    async def _check(self) -> None:
        state = self.state.value
        # What was refused is tried again: a clock may have been put right.
        known = () if state.error else self._contents
        try:
            found = await self._thread.call(partial(_load, self._where, known), deadline=_READING)
        except (RefusedError, OSError, ValueError) as error:
            why = str(error) if isinstance(error, RefusedError) else one_line(reason(error))
            self._reporter.failed(why)
            self.state.publish(replace(state, error=why))
            return
        if found is None:
            return
        self._reporter.works()
        contents, context, expires_at = found
        if contents != self._contents:
            self._contents = contents
            self.context.publish(context)
            expires = stamp(expires_at)
            log.info("the certificate of metrics.tls is in force", expires=expires)
        self.state.publish(TlsState(expires_at=expires_at))


def _load(
    where: TlsFiles, known: tuple[bytes, ...]
) -> tuple[tuple[bytes, ...], ssl.SSLContext, float] | None:
    """Contents, context and expiry of the files; None: they are `known`, or half replaced."""
    contents = _contents(where)
    if contents == known:
        return None
    try:
        return contents, *_context(where, contents[0])
    except RefusedError:
        if _contents(where) != contents:
            return None  # a new certificate, and the old key: both are there the next time
        raise


def check(where: TlsFiles) -> float:
    """Returns when the certificate expires, in seconds since 1970. May block."""
    return _context(where, _contents(where)[0])[1]


def _contents(where: TlsFiles) -> tuple[bytes, ...]:
    found = []
    for path in filter(None, where):
        try:
            content = files.content(path, _LARGEST + 1)
        except OSError as error:
            why = error.strerror or error
            raise RefusedError(f"{path} cannot be read: {why}", "let the agent read it") from error
        if content is None:
            raise RefusedError(f"{path} is missing", "mount the Secret there")
        if len(content) > _LARGEST:
            raise RefusedError(f"{path} is larger than 1 MiB", "that is not a certificate")
        found.append(content)
    return tuple(found)


def _context(where: TlsFiles, cert: bytes) -> tuple[ssl.SSLContext, float]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # A passphrase would be asked for at a terminal.
        context.load_cert_chain(where.cert, where.key, password=lambda: "")
    except ssl.SSLError as error:
        raise RefusedError(
            f"{where.cert} and {where.key} cannot be used ({_openssl_reason(error)})",
            "both have to be PEM, the key that of the first certificate, and without a passphrase",
        ) from error
    expires_at = _expiry(context, where.cert, cert)
    if where.client_ca is not None:
        try:
            context.load_verify_locations(where.client_ca)
        except ssl.SSLError as error:
            why = f"{where.client_ca} has no certificate of an authority ({_openssl_reason(error)})"
            raise RefusedError(why, "it has to be PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context, expires_at


def _expiry(server: ssl.SSLContext, path: Path, cert: bytes) -> float:
    """Returns the expiry as a client that trusts this certificate sees it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # clients know it by names of their own
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(cadata=cert.decode("ascii", errors="replace"))
        ends = (
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for _ in range(3):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        found = ends[0].getpeercert() or {}
        return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"{path} is not valid ({one_line(error.verify_message)})",
            "it has to be valid now, by this host's clock, and for servers: with serverAuth in its "
            "extended key usage, or none",
        ) from error
    except (ssl.SSLError, KeyError, ValueError) as error:
        raise RefusedError(f"{path} cannot be used", _openssl_reason(error)) from error


def _openssl_reason(error: Exception) -> str:
    return one_line(getattr(error, "reason", None) or str(error).partition(" (_ssl")[0])
