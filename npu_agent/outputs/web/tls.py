"""The certificate of the public port, followed while the agent runs: the last good one stays.

Good is what OpenSSL loads. One that clients refuse, such as an expired one, is not held back:
`TlsState.expires_at` and the alert on it say so.
"""

from __future__ import annotations

import asyncio
import base64
import calendar
import re
import ssl
import time
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

_VALIDITY = re.compile(
    rb"\x30.(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z", re.DOTALL
)
"""The first and the last second of a certificate in DER: a sequence of two UTCTime or
GeneralizedTime (RFC 5280, 4.1.2.5)."""

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


class Certificates:
    """`context` is the TLS context in force, `state` how it stands."""

    def __init__(self, where: TlsFiles, interval: float = 5.0) -> None:
        self.state: Feed[TlsState] = Feed(TlsState())
        self.context: Feed[ssl.SSLContext | None] = Feed(None)
        self._where = where
        self._interval = interval
        self._thread = DaemonThread()
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
        try:
            load = partial(_load, self._where, self._contents)
            loaded = await self._thread.call(load, deadline=_READING)
        except (RefusedError, OSError, ValueError) as error:
            why = str(error) if isinstance(error, RefusedError) else one_line(reason(error))
            self._reporter.failed(why)
            self.state.publish(replace(state, error=why))
            return
        self._reporter.works()
        if loaded is not None:
            self._contents, context, expires_at = loaded
            self.context.publish(context)
            log.info("the certificate of metrics.tls is in force", expires=stamp(expires_at))
            state = TlsState(expires_at=expires_at)
        self.state.publish(replace(state, error=None))


def _load(
    where: TlsFiles, last: tuple[bytes, ...]
) -> tuple[tuple[bytes, ...], ssl.SSLContext, float] | None:
    """Contents, context and expiry of the files; None: they are as they were `last`."""
    contents = _contents(where)
    return None if contents == last else (contents, *_context(where, contents[0]))


def check(where: TlsFiles) -> float:
    """Returns when the certificate expires, in seconds since 1970. May block."""
    return _context(where, _contents(where)[0])[1]


def _contents(where: TlsFiles) -> tuple[bytes, ...]:
    contents = []
    for path in filter(None, where):
        try:
            content = files.content(path, _LARGEST + 1)
        except OSError as error:
            why = error.strerror or error
            raise RefusedError(f"{path} cannot be read: {why}: let the agent read it") from error
        if content is None:
            raise RefusedError(f"{path} is missing: mount the Secret there")
        if len(content) > _LARGEST:
            raise RefusedError(f"{path} is larger than 1 MiB: that is not a certificate")
        contents.append(content)
    return tuple(contents)


def _context(where: TlsFiles, cert: bytes) -> tuple[ssl.SSLContext, float]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # A passphrase would be asked for at a terminal.
        context.load_cert_chain(where.cert, where.key, password=lambda: "")
    except ssl.SSLError as error:
        raise RefusedError(
            f"{where.cert} and {where.key} cannot be used ({_openssl_reason(error)}): both have to "
            "be PEM, the key that of the first certificate, and without a passphrase"
        ) from error
    if where.client_ca is not None:
        try:
            context.load_verify_locations(where.client_ca)
        except ssl.SSLError as error:
            raise RefusedError(
                f"{where.client_ca} has no certificate of an authority ({_openssl_reason(error)}): "
                "it has to be PEM"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context, _expiry(where.cert, cert)


def _expiry(path: Path, cert: bytes) -> float:
    """Returns when a PEM file's first certificate expires, which OpenSSL has read already.

    The standard library says it of a peer's certificate only.
    """
    pem = re.search(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", cert, re.DOTALL)
    validity = _VALIDITY.search(base64.b64decode(pem[1])) if pem else None
    if validity is None:
        raise RefusedError(f"{path} does not say when it expires: it has to be X.509 and PEM")
    short, long = validity.groups()
    text, form = (short, "%y%m%d%H%M%S") if short else (long, "%Y%m%d%H%M%S")
    return float(calendar.timegm(time.strptime(text.decode(), form)))


def _openssl_reason(error: ssl.SSLError) -> str:
    return one_line(error.reason or str(error).partition(" (_ssl")[0])
