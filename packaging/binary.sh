#!/bin/sh
# Makes dist/npu-agent, the agent as one executable file, and its SBOM beside it. Usage: binary.sh
# PYTHON [DIRECTORY], with the Python of an environment that has requirements/run.txt and binary.txt.
set -eu
python=$1
dist=$(realpath -m "${2:-$(dirname "$0")/../dist}")
cd "$(dirname "$0")/.."
command -v strip >/dev/null || { echo "make binary: install binutils: strip is missing" >&2; exit 1; }
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' npu_agent/__init__.py)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The last two make it the same each time.
export PYINSTALLER_CONFIG_DIR="$work" PYTHONHASHSEED=0
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}"
REVISION=${REVISION:-$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || true)}
export REVISION
"$python" docs/runbook.py
"$python" -m PyInstaller --noconfirm --log-level WARN --distpath "$dist" --workpath "$work" \
    packaging/npu-agent.spec
"$python" packaging/sbom.py --locked "${LOCKED:-requirements/run.txt}" --name npu-agent-binary \
    --version "$version" --created "$SOURCE_DATE_EPOCH" > "$dist/npu-agent.spdx.json"
echo "$dist/npu-agent $version for $(uname -m), $(du -k "$dist/npu-agent" | cut -f1) KiB"
