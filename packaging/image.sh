#!/bin/sh
# Builds the image, and writes beside it what is in it and what it was made from:
# dist/npu-agent-image.spdx.json (SBOM) and dist/npu-agent-image.provenance.json. By environment:
#   IMAGE   its name (npu-agent:VERSION)
#   BASE    the image that it is built on (what the Containerfile says)
#   TOOL    buildah, podman or docker, with options if need be (the first of them that is there)
#   SOURCE  where the source is, for the label org.opencontainers.image.source (the git remote, if http)
#   FLAGS   more options for the build, such as --platform linux/arm64
set -eu
cd "$(dirname "$0")/.."

if [ -z "${TOOL:=$(command -v buildah || command -v podman || command -v docker || true)}" ]; then
    echo "make image: none of buildah, podman and docker is installed: install one, or give TOOL=" >&2
    exit 1
fi
kind=$(basename "${TOOL%% *}")
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' npu_agent/__init__.py)
: "${IMAGE:=npu-agent:$version}"

# The date of the commit and not of today, so that a commit gives the same image each time.
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
at=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
[ -z "$(git status --porcelain -- npu_agent packaging requirements Containerfile 2>/dev/null)" ] \
    || revision=$revision-dirty
remote=$(git remote get-url origin 2>/dev/null | grep '^https\?://' || true)
source=${SOURCE:-$remote}

set -- --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "CREATED_AT=$at" --build-arg "CREATED=$(date -u -d "@$at" +%Y-%m-%dT%H:%M:%SZ)"
[ -z "${BASE:-}" ] || set -- "$@" --build-arg "BASE=$BASE"
[ -z "$source" ] || set -- "$@" --label "org.opencontainers.image.source=$source"
file=Containerfile
case $kind in
    docker)
        # BuildKit has a name of its own for the date, and for the list of what it may see.
        set -- "$@" --build-arg "SOURCE_DATE_EPOCH=$at"
        beside=$(mktemp -d)
        trap 'rm -rf "$beside"' EXIT
        file=$beside/Containerfile
        cp Containerfile "$file"
        cp .containerignore "$file.dockerignore"
        ;;
    *) set -- "$@" --timestamp "$at" ;;
esac
# shellcheck disable=SC2086  # TOOL and FLAGS are several words
$TOOL build ${FLAGS:-} "$@" --file "$file" --tag "$IMAGE" .

mkdir -p dist
inside=/usr/share/doc/npu-agent/sbom.spdx.json
sbom=dist/npu-agent-image.spdx.json
# shellcheck disable=SC2086
case $kind in
    buildah)
        container=$($TOOL from --pull-never "$IMAGE")
        copy="cp \"\$($TOOL mount $container)$inside\" $sbom"
        # Who is not root sees an image's files only in a user namespace.
        if [ "$(id -u)" = 0 ]; then sh -c "$copy"; else buildah unshare sh -c "$copy"; fi
        $TOOL rm "$container" >/dev/null
        ;;
    *)
        container=$($TOOL create "$IMAGE")
        $TOOL cp "$container:$inside" "$sbom"
        $TOOL rm "$container" >/dev/null
        ;;
esac
case $kind in
    buildah) id=$($TOOL inspect --type image --format '{{.FromImageID}}' "$IMAGE") ;;
    *) id=$($TOOL image inspect --format '{{.Id}}' "$IMAGE") ;;
esac
provenance=dist/npu-agent-image.provenance.json
base=${BASE:-$(sed -n 's/^ARG BASE=//p' Containerfile)}
python3 packaging/provenance.py --image "$IMAGE" --id "$id" --base "$base" --source "$source" \
    --revision "$revision" --built-at "$at" > "$provenance"
echo "$IMAGE ($revision), its SBOM in $sbom, its provenance in $provenance"
