#!/bin/sh
# Makes the archive of `kubectl furiosa-npu` for this machine's system, and the manifest by which krew
# installs it. Usage: krew.sh PYTHON [DIRECTORY], with the Python of an environment that has
# requirements/kubectl.txt and binary.txt.
#   RELEASE  the address of the directory that has the archive, for the manifest
# The manifest has one platform for each furiosa-npu_*.tar.gz that is in the directory.
set -eu
python=$1
dist=$(realpath -m "${2:-$(dirname "$0")/../dist}")
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' npu_agent/__init__.py)
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
LOCKED=requirements/kubectl.txt sh packaging/binary.sh "$python" "$work" >&2
mv "$work/npu-agent" "$work/kubectl-furiosa_npu"
cp LICENSE "$work"
mkdir -p "$dist"
case $(uname -m) in x86_64) here=amd64 ;; aarch64) here=arm64 ;; *) here=$(uname -m) ;; esac
tar -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -c \
    LICENSE kubectl-furiosa_npu npu-agent.spdx.json |
    gzip -9n > "$dist/furiosa-npu_linux_$here.tar.gz"

platform() {
    cat <<END
    - selector:
        matchLabels: {os: linux, arch: $2}
      uri: ${RELEASE:-https://example.com/npu-agent}/$(basename "$1")
      sha256: $(sha256sum "$1" | cut -d' ' -f1)
      bin: kubectl-furiosa_npu
END
}
{
    cat <<END
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: furiosa-npu
spec:
  version: v$version
  homepage: ${RELEASE:-https://example.com/npu-agent}
  shortDescription: FuriosaAI NPUs of a cluster, and why a Pod waits
  description: |
    Shows the NPUs of a cluster, for device plugin and DRA: what each Node has
    free and the widest device still to be had, which Pod holds which cores and
    who lets them idle, and why a Pod is Pending. Takes one card out of service.
    Needs nothing in the cluster but npu-agent.
  caveats: |
    For completion by the shell put a link to the program on your PATH:
      ln -s "\$(realpath "\$(command -v kubectl-furiosa_npu)")" ~/bin/kubectl_complete-furiosa_npu
  platforms:
END
    for archive in "$dist"/furiosa-npu_linux_*.tar.gz; do
        arch=${archive##*_}
        platform "$archive" "${arch%.tar.gz}"
    done
} > "$dist/furiosa-npu.yaml"
echo "$dist/furiosa-npu.yaml"
