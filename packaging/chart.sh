#!/bin/sh
# Makes dist/npu-agent-VERSION.tgz, the Helm chart. Usage: chart.sh [DIRECTORY]. By environment:
#   HELM    the helm command, 3 or 4 (helm)
#   SOURCE  where the source is, for the chart's home and sources (the git remote, if http)
set -eu
dist=$(realpath -m "${1:-$(dirname "$0")/../dist}")
cd "$(dirname "$0")/.."
helm=${HELM:-helm}
command -v "$helm" >/dev/null || { echo "make chart: $helm is not installed: install Helm, or give HELM=" >&2; exit 1; }
remote=$(git remote get-url origin 2>/dev/null | grep '^https\?://' || true)
source=${SOURCE:-$remote}
version=$(sed -n 's/^version: //p' k8s/chart/Chart.yaml)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -R k8s/chart "$work/npu-agent"
if [ -n "$source" ]; then
    printf 'home: %s\nsources: ["%s"]\n' "$source" "$source" >> "$work/npu-agent/Chart.yaml"
fi
mkdir -p "$dist"
"$helm" package --destination "$dist" "$work/npu-agent" >/dev/null
echo "$dist/npu-agent-$version.tgz"
