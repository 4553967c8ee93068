#!/bin/sh
# Writes the lock files from pyproject.toml: every version and hash, for every Python that we support,
# and no address of a registry. Usage: lock.sh UV [--upgrade]
set -eu
uv=$1; shift
compile() {
    out=$1; shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command "make lock" --output-file "requirements/$out" "$@"
}
compile run.txt   "$@" pyproject.toml
compile kubectl.txt "$@" --extra kubectl pyproject.toml
compile build.txt "$@" --group pyproject.toml:build
compile dev.txt   "$@" --group pyproject.toml:dev pyproject.toml
compile protos.txt "$@" --group pyproject.toml:protos
compile binary.txt "$@" --group pyproject.toml:binary
compile pictures.txt "$@" --group pyproject.toml:pictures
compile ray.txt "$@" --group pyproject.toml:ray
