"""Prints what an image was made from: an in-toto statement with SLSA provenance 1.0.

It says what the script knows, and is worth as much as the machine that ran it: sign it there
(docs/dev/release.md). The format: https://slsa.dev/spec/v1.0/provenance.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime
from typing import Any

TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:npu-agent:containerfile:v1"
"""A build of this repository's Containerfile by packaging/image.sh."""


def statement(
    *, image: str, id_: str, base: str, source: str, revision: str, built_at: int
) -> dict[str, Any]:
    """The statement.

    Args:
        image: the image's name.
        id_: the digest of its configuration, which buildah, podman and docker call its ID.
        base: the base image, best by digest.
        source: where the source is; "" where that is not known.
        revision: the commit; with ``-dirty`` if there were changes.
        built_at: of the commit, seconds since 1970: a commit gives the same statement each time.
    """
    at = datetime.fromtimestamp(built_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    commit = revision.removesuffix("-dirty")
    made_from: list[dict[str, Any]] = [{"uri": f"git+{source}" if source else "git"}]
    if commit != "unknown":
        made_from[0]["digest"] = {"gitCommit": commit}
    if revision != commit:
        made_from[0]["annotations"] = {"dirty": True}
    made_from.append({"uri": base})
    if found := re.search(r"@sha256:([0-9a-f]{64})$", base):
        made_from[1]["digest"] = {"sha256": found[1]}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": image, "digest": {"sha256": id_.removeprefix("sha256:")}}],
        "predicateType": TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"base": base, "revision": revision},
                "resolvedDependencies": made_from,
            },
            "runDetails": {
                "builder": {"id": "urn:npu-agent:packaging/image.sh"},
                "metadata": {"startedOn": at},
            },
        },
    }


def main() -> None:
    """Prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("image", "id", "base", "source", "revision"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--built-at", type=int, required=True)
    args = parser.parse_args()
    made = statement(
        image=args.image,
        id_=args.id,
        base=args.base,
        source=args.source,
        revision=args.revision,
        built_at=args.built_at,
    )
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
