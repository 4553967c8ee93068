"""Throw-away authorities and certificates, made by the openssl program."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp

from npu_agent.outputs.web.tls import TlsFiles

CA_USAGE = ("-addext", "keyUsage=critical,keyCertSign")
HOST = "IP:127.0.0.1,DNS:npu-agent"
_CA = """\
[ca]
default_ca = ours
[ours]
database = issued
new_certs_dir = .
rand_serial = yes
unique_subject = no
default_md = sha256
policy = subject
[subject]
commonName = supplied
"""
_DATE = "%Y%m%d%H%M%SZ"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """One that signs what it is asked to; the files are in its directory."""

    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"

    def sign(
        self, name: str, *, days: int = 2, usage: str = "serverAuth", names: str = HOST
    ) -> tuple[Path, Path]:
        """A new certificate for these hosts and its key; `days` may be negative."""
        cert, key = (self.directory / f"{name}.{ending}" for ending in ("crt", "key"))
        _openssl(self.directory, "req", *_KEY, "-subj", f"/CN={name}",
                 "-keyout", key.name, "-out", "request")  # fmt: skip
        extensions = f"subjectAltName={names}\nextendedKeyUsage={usage}\n"
        (self.directory / "extensions").write_text(extensions, encoding="utf-8")
        # By `ca`, as `x509 -days` of OpenSSL 3.5 signs none that has ended, and 3.0 knows no dates.
        (self.directory / "ca.cnf").write_text(_CA, encoding="utf-8")
        (self.directory / "issued").touch()
        now = datetime.now(UTC)
        end = now + timedelta(days=days)
        start = min(now, end) - timedelta(days=1)
        _openssl(self.directory, "ca", "-batch", "-config", "ca.cnf", "-notext",
                 "-startdate", f"{start:{_DATE}}", "-enddate", f"{end:{_DATE}}", "-in", "request",
                 "-extfile", "extensions", "-cert", "ca.crt", "-keyfile", "ca.key",
                 "-out", cert.name)  # fmt: skip
        return cert, key

    def trusting(self, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """For a client that trusts it; with a certificate of its own."""
        context = ssl.create_default_context(cafile=self.ca)
        if client:
            context.load_cert_chain(*client)
        return context


def authority(directory: Path, name: str = "ca", *, usage: tuple[str, ...] = CA_USAGE) -> Authority:
    """A new one."""
    directory.mkdir(exist_ok=True)
    _openssl(directory, "req", "-x509", *_KEY, "-subj", f"/CN={name}", "-days", "2",
             *usage, "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip
    return Authority(directory)


def placed(directory: Path, cert: tuple[Path, Path], ca: Path | None = None) -> TlsFiles:
    """These files as the kubelet mounts a Secret; called again it replaces them all together."""
    fresh = Path(mkdtemp(prefix="..", dir=directory))
    for path, name in zip((*cert, ca), ("tls.crt", "tls.key", "ca.crt"), strict=True):
        if path is not None:
            (fresh / name).write_bytes(path.read_bytes())
            if not (directory / name).is_symlink():
                (directory / name).symlink_to(f"..data/{name}")
    link = directory / "..data_tmp"
    link.symlink_to(fresh.name)
    link.replace(directory / "..data")
    return TlsFiles(
        cert=directory / "tls.crt",
        key=directory / "tls.key",
        client_ca=directory / "ca.crt" if ca else None,
    )


def _openssl(directory: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
