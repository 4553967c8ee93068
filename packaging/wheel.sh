#!/bin/sh
# Makes the wheel, its source archive, and dist/npu-agent-wheel.spdx.json: the SBOM of what it was
# tested with. Usage: wheel.sh BIN DIRECTORY, with the programs of the environment of development.
set -eu
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' npu_agent/__init__.py)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
"$1/uv" build --quiet --no-build-isolation --python "$1/python" --out-dir "$2"
"$1/python" packaging/sbom.py --locked requirements/run.txt --name npu-agent-wheel \
    --version "$version" --created "$SOURCE_DATE_EPOCH" > "$2/npu-agent-wheel.spdx.json"
