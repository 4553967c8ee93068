"""Writes what is in an image or a binary, or what a wheel needs, as SPDX 2.3 JSON.

Run by the very Python that is shipped: the locked requirements say which packages belong to the
agent, that Python's environment says which of them are installed and under which licence, and
dpkg's database, if it is there, what else the image is made of. The same input gives the same
bytes.

Format: SPDX specification 2.3, and the purl specification for the addresses of packages.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG = Path("/var/lib/dpkg/status")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")
_IDENTIFIERS = frozenset({"Apache-2.0", "BSD-3-Clause", "MIT", "MPL-2.0", "PSF-2.0"})
_CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
}
"""Those that name one licence only; "BSD License" may be any of several."""
_UNKNOWN = "NOASSERTION"


def main() -> int:
    """Prints the document; 1 and a message if the environment is not what is locked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--locked", type=Path, required=True, help="requirements/run.txt")
    parser.add_argument("--version", required=True, help="of npu-agent")
    parser.add_argument(
        "--name", required=True, help="what this describes, such as npu-agent-image"
    )
    parser.add_argument("--created", type=int, required=True, help="seconds since 1970")
    parser.add_argument("--system", action="store_true", help="the packages of dpkg as well")
    args = parser.parse_args()
    parts = [*_locked(args.locked), _python()]
    if args.system and DPKG.exists():
        parts += _dpkg(DPKG.read_text(encoding="utf-8"))
    json.dump(_document(args.name, args.version, args.created, parts), sys.stdout, indent=1)
    print()
    return 0


def _locked(requirements: Path) -> Iterator[dict[str, Any]]:
    """The locked packages that are installed.

    The rest of them is for other Pythons and systems: pip has decided that when it installed them.
    """
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if not (pin := _PIN.match(line)):
            continue
        name, version = pin.groups()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.version != version:
            sys.exit(
                f"{name} {found.version} is installed and {requirements} says {version}: "
                "install it anew from there"
            )
        yield _package(name, version, f"pkg:pypi/{name}@{quote(version)}", _licence(found))


def _licence(found: importlib.metadata.Distribution) -> str:
    """As SPDX writes it; what an author writes freely is not guessed at."""
    # Distribution.metadata has no `get` in the types of Python 3.11.
    told: Mapping[str, str] = dict(found.metadata.items())  # type: ignore[attr-defined]
    if expression := told.get("License-Expression"):
        return expression
    if told.get("License") in _IDENTIFIERS:
        return told["License"]
    named = [c for c in found.metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    return _CLASSIFIERS.get(named[0], _UNKNOWN) if len(named) == 1 else _UNKNOWN


def _python() -> dict[str, Any]:
    version = platform.python_version()
    return _package("python", version, f"pkg:generic/python@{version}", "PSF-2.0")


def _dpkg(status: str) -> Iterator[dict[str, Any]]:
    """The installed packages of a Debian, Ubuntu or the like: see dpkg(1) and deb-control(5)."""
    system = platform.freedesktop_os_release()
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version = fields["Package"], fields["Version"]
        purl = (
            f"pkg:deb/{system['ID']}/{name}@{quote(version, safe='')}"
            f"?arch={fields['Architecture']}&distro={system.get('VERSION_CODENAME', '')}"
        )
        yield _package(name, version, purl, _UNKNOWN)


def _package(name: str, version: str, purl: str, licence: str) -> dict[str, Any]:
    kind = purl.split("/", 1)[0].removeprefix("pkg:")
    return {
        "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{kind}-{name}"),
        "name": name,
        "versionInfo": version,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": licence,
        "copyrightText": _UNKNOWN,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": purl,
            }
        ],
    }


def _document(name: str, version: str, created: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    agent = _package("npu-agent", version, f"pkg:generic/npu-agent@{version}", "Apache-2.0")
    packages = [agent, *sorted(parts, key=lambda part: str(part["SPDXID"]))]
    digest = hashlib.sha256(json.dumps(packages).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        # Has to be unique for its content, and need not be the address of anything.
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}-{version}-{digest[:32]}",
        "creationInfo": {
            "created": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: npu-agent packaging/sbom.py"],
        },
        "packages": packages,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": agent["SPDXID"],
            },
            *(
                {
                    "spdxElementId": agent["SPDXID"],
                    "relationshipType": "CONTAINS",
                    "relatedSpdxElement": part["SPDXID"],
                }
                for part in packages[1:]
            ),
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
